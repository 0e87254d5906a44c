"""Quantised checkpoints: equal to the same checkpoint dequantised beforehand."""

import json
from pathlib import Path

import parity_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftstates.model.folder import ModelFolder
from draftstates.verify.parity.quantised import NotDequantised, Scheme
from draftstates.verify.parity.streamed import StreamedModel

BLOCK = (48, 40)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"type": "int", "num_bits": 4, "symmetric": True, "group_size": 32}}
    },
}


def to_blocks(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return an FP8 weight with its scales, and the weight that both stand for.

    The matrices are no whole number of blocks.
    """
    rows, columns = -(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1])
    scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3)) + 0.5
    quantised = weight.float().to(torch.float8_e4m3fn)
    plain = quantised.float()
    for row in range(plain.shape[0]):
        for column in range(plain.shape[1]):
            plain[row, column] *= scale[row // BLOCK[0], column // BLOCK[1]]
    return {"weight": quantised, "weight_scale_inv": scale}, plain


def to_packed(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return an INT4 weight in compressed-tensors' packing, and the weight that it stands for."""
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(-8, 8, (rows, columns), generator=generator)
    scale = torch.rand(rows, columns // 32, generator=generator) * 0.05
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        packed |= (numbers[:, place::8] + 8) << (4 * place)
    parts = {
        "weight_packed": packed.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    return parts, numbers * scale.repeat_interleave(32, 1)


@pytest.mark.parametrize(
    ("quantise", "config"), [(to_blocks, FP8), (to_packed, INT4)], ids=["fp8", "int4"]
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_quantised_checkpoint_equals_the_same_one_dequantised_beforehand(
    tmp_path: Path, family: str, quantise: object, config: dict
) -> None:
    plain, packed = (parity_models.make(family, tmp_path / name) for name in ("plain", "packed"))
    changed = 0
    for file in plain.glob("*.safetensors"):
        left, right = {}, {}
        for name, tensor in load_file(file).items():
            if "_proj." in name and "layers" in name:
                parts, left[name] = quantise(tensor)
                stem = name.rpartition(".")[0]
                right |= {f"{stem}.{part}": value for part, value in parts.items()}
                changed += 1
            else:
                left[name] = right[name] = tensor
        save_file(left, file, metadata={"format": "pt"})
        save_file(right, packed / file.name, metadata={"format": "pt"})
    assert changed > 20
    described = json.loads((packed / "config.json").read_text())
    described["quantization_config"] = config
    (packed / "config.json").write_text(json.dumps(described))
    input_ids = parity_models.ids(9)
    expected = StreamedModel(ModelFolder(plain)).states(input_ids)
    found = StreamedModel(ModelFolder(packed)).states(input_ids)
    assert found.reason is None
    for name, states in expected.by_name.items():
        assert torch.equal(found.by_name[name], states), name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method gptq"),
        ({"quant_method": "awq"}, "quant_method awq"),
        ({"quant_method": "mxfp4"}, "quant_method mxfp4"),
        ({"quant_method": "fp8"}, "without weight_block_size"),
        ({**INT4, "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        ({**INT4, "config_groups": {}}, "0 groups"),
    ],
)
def test_other_formats_are_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(NotDequantised, match=named):
        Scheme.of(config)


def test_packed_weights_with_zero_points_are_refused() -> None:
    slices = {f"a.{part}": object() for part in ("weight_packed", "weight_zero_point")}
    with pytest.raises(NotDequantised, match="a.weight_zero_point is not dequantised"):
        Scheme.of(INT4).plain(slices)
