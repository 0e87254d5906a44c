"""Promise 5, layer by layer: one wrong layer is seen, whatever the layers before it add up to."""

from collections.abc import Callable
from pathlib import Path

import parity_models
import pytest
import torch
from test_check import check, rows_of, spec_of

from draftstates.model.folder import ModelFolder
from draftstates.verify.parity import check as parity_check
from draftstates.verify.parity.alone import LayersAlone
from draftstates.verify.parity.check import ParityFailed
from draftstates.verify.parity.compare import Limit
from draftstates.verify.parity.streamed import StreamedModel

HALF = {"compute_dtype": "bfloat16", "stored_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity_models.make("llama_with_biases", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", sorted(parity_models.FAMILIES))
def test_a_layer_alone_gives_the_next_state_of_a_longer_prompt(family: str, tmp_path: Path) -> None:
    """Masks, windows and rotary values are cut to the rows; the pass itself stays as it was."""
    model = StreamedModel(ModelFolder(parity_models.make(family, tmp_path)))
    input_ids = parity_models.ids(100)
    plain = model.states(input_ids).by_name
    captured = {name: rows[:64] for name, rows in plain.items()}
    alone = LayersAlone(captured, compute=torch.bfloat16)
    found = model.states(input_ids, alone=alone).by_name
    assert alone.problem is None
    assert list(alone.found) == ["r_1", "r_2", "r_3", "r_4"]
    for name, layer in alone.found.items():
        torch.testing.assert_close(layer.right, captured[name], rtol=1e-3, atol=1e-3)
        assert not torch.equal(layer.control, layer.right)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama_with_biases", "qwen3_moe", "gemma3_text"])
def test_an_honest_server_in_half_precision_keeps_a_margin_of_two(
    family: str, attention: str, tmp_path: Path
) -> None:
    folder = parity_models.make(family, tmp_path)
    spec = spec_of(folder, **HALF)
    rows = rows_of(folder, spec, tokens=40, dtype=torch.bfloat16, attention=attention)
    found = check(folder, rows, spec)
    assert found.result == "all 4 layers"
    assert found.reference.endswith("4 layers also alone")
    assert max(layer.alone / layer.alone_limit for layer in found.layers if layer.alone) < 0.5


def with_half_a_bias(model: torch.nn.Module) -> None:
    model.model.layers[2].self_attn.v_proj.bias[:2] /= 2


def with_another_scale_of_a_norm(model: torch.nn.Module) -> None:
    model.model.layers[2].input_layernorm.weight *= 1.1


def with_another_epsilon(model: torch.nn.Module) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.2


def in_eight_bits(model: torch.nn.Module) -> None:
    for weight in (p for p in model.model.layers.parameters() if p.ndim == 2):
        scale = weight.abs().amax(-1, keepdim=True) / 448
        weight.copy_((weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale)


@pytest.mark.parametrize(
    "change",
    [with_half_a_bias, with_another_scale_of_a_norm, with_another_epsilon, in_eight_bits],
)
def test_a_small_fault_of_a_layer_is_more_than_its_roundings(
    llama: Path, change: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of all layers together, the control, does not see it."""
    spec = spec_of(llama, **HALF)
    rows = rows_of(llama, spec, tokens=40, dtype=torch.bfloat16, change=change)
    with pytest.raises(ParityFailed, match="before it, the median row .*do not explain it"):
        check(llama, rows, spec)
    monkeypatch.setattr(parity_check, "layers_alone", lambda *_, **__: None)
    assert check(llama, rows, spec).result == "all 4 layers"


def test_a_layer_that_cannot_be_computed_alone_is_named(llama: Path) -> None:
    model = StreamedModel(ModelFolder(llama))
    wrong = {f"r_{k}": torch.zeros(4, 3) for k in range(5)}
    alone = LayersAlone(wrong, compute=torch.bfloat16)
    assert model.states(parity_models.ids(9), alone=alone).reason is None
    assert alone.found == {} and alone.problem.startswith("r_0: RuntimeError: ")


def test_layers_are_judged_alone_only_where_the_control_says_what_roundings_do() -> None:
    half = Limit.of(compute="bfloat16", stored="bfloat16")
    assert (half.alone(0.0), half.alone(0.002), half.alone(1.0)) == (2**-8, 0.006, 2**-5)
    others = [
        Limit.of(compute="float32", stored="bfloat16"),
        Limit.of(compute="float16", stored="bfloat16"),
        Limit.of(compute="bfloat16", stored="bfloat16", quantization="fp8"),
    ]
    assert [limit.rounding for limit in others] == [None] * 3
