"""The load audit on models of plain PyTorch: tensors not read and parameters not filled."""

import dataclasses
import importlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synthetic import capture_spec

from draftstates.capture import load_audit
from draftstates.capture.load_audit import Findings, audited, faults
from draftstates.capture.settings import CaptureSettings
from draftstates.model.folder import ModelFolder


class Loading(torch.nn.Module):
    """A model with the ways in which SGLang's loaders fill parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape, dtype in (
            ("fused", (8, 4), torch.bfloat16),
            ("experts", (2, 3, 4), torch.float32),
            ("assigned", (4,), torch.float32),
            ("scalar", (1,), torch.float32),
            ("packed", (128,), torch.uint8),
            ("weight_scale", (3,), torch.float32),
        ):
            value = torch.zeros(shape, dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights) -> None:  # noqa: ANN001
        threads = []
        for name, tensor in weights:
            match name:
                case "q" | "k":
                    rows = slice(0, 4) if name == "q" else slice(4, 8)
                    self.fused.data[rows].copy_(tensor.to(torch.bfloat16))
                case "expert.0" | "expert.1":
                    place = self.experts.data[int(name[-1])]
                    threads.append(threading.Thread(target=place.copy_, args=(tensor.T,)))
                    threads[-1].start()
                case "assigned":
                    self.assigned.data = tensor
                case "scalar":
                    self.scalar.data.fill_(tensor.item())
                case "packed":
                    self.packed.data[:] = torch.cat([tensor, tensor])
                case "weight_scale":
                    self.weight_scale.data[0] = tensor
                case "weight_scale.1" | "weight_scale.2":
                    self.weight_scale.data[int(name[-1])] = tensor
        for thread in threads:
            thread.join()


def checkpoint() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 4), "k": (4, 4), "expert.0": (4, 3), "expert.1": (4, 3), "assigned": (4,)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    # 0xFF is the pattern of a byte, and a packed weight may hold it.
    packed = torch.full((64,), 3, dtype=torch.uint8)
    packed[5] = 0xFF
    scalars = {"scalar": torch.tensor([2.0]), "weight_scale": torch.tensor(0.5)}
    return {**tensors, **scalars, "packed": packed}


def audit(tensors: dict[str, torch.Tensor]) -> tuple[Loading, Findings]:
    model = Loading()
    return model, audited(model.load_weights, model, tensors.items())


def test_a_whole_checkpoint_is_read_and_fills_the_model() -> None:
    tensors = checkpoint()
    model, found = audit(tensors)
    assert found.seen == found.read == set(tensors)
    assert found.unfilled == {}
    assert type(model.assigned.data) is torch.Tensor
    assert torch.equal(model.experts.data[1], tensors["expert.1"].T)
    assert torch.equal(model.fused.data[4:], tensors["k"].bfloat16())
    # A fused layer's other slots keep the values that they were made with.
    assert model.weight_scale.tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "parameter", "left"),
    [
        ("q", "fused", "16 of 32"),
        ("expert.0", "experts", "12 of 24"),
        ("assigned", "assigned", "4 of 4"),
        ("scalar", "scalar", "1 of 1"),
        ("packed", "packed", "128 of 128"),
        ("weight_scale", "weight_scale", "3 of 3"),
    ],
)
def test_a_tensor_that_is_missing_leaves_its_parameter_unfilled(
    name: str, parameter: str, left: str
) -> None:
    tensors = checkpoint()
    del tensors[name]
    assert audit(tensors)[1].unfilled == {parameter: left}


@pytest.mark.parametrize(
    ("slots", "left"),
    [({"weight_scale", "weight_scale.1"}, "1 of 3"), ({"weight_scale.2"}, "2 of 3")],
)
def test_a_fused_scale_with_other_slots_than_the_first_alone_is_unfilled(
    slots: set[str], left: str
) -> None:
    tensors = {name: each for name, each in checkpoint().items() if name != "weight_scale"}
    _, found = audit({**tensors, **dict.fromkeys(slots, torch.tensor(0.5))})
    assert found.unfilled == {"weight_scale": left}


def test_a_tensor_that_the_model_skips_is_not_read() -> None:
    _, found = audit({**checkpoint(), "q.bias": torch.ones(4)})
    assert found.seen - found.read == {"q.bias"}


def test_of_several_ranks_a_tensor_counts_where_any_reads_it_and_each_must_be_filled() -> None:
    one = Findings(seen={"a", "b"}, read={"a"}, unfilled={"x": "1 of 2"})
    two = Findings(seen={"a", "b"}, read={"b"}, unfilled={"y": "2 of 2"})
    both = Findings.of_ranks([one, two])
    assert both.seen == both.read == {"a", "b"}
    assert both.unfilled == {"x": "1 of 2", "y": "2 of 2"}


class Experts(torch.nn.Module):
    """A layer's experts whose rows and columns SGLang makes round numbers, and fills at once."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.ones(2, 8, 6, dtype=torch.uint8)
        self.w13_weight = torch.nn.Parameter(ones - 1, requires_grad=False)
        self.w13_weight_scale = torch.nn.Parameter(ones * 127, requires_grad=False)
        bias = torch.zeros(2, 8, dtype=torch.bfloat16)
        self.w13_weight_bias = torch.nn.Parameter(bias, requires_grad=False)
        order = torch.zeros(2, 5, dtype=torch.int32)
        self.w13_weight_g_idx = torch.nn.Parameter(order, requires_grad=False)
        self.w13_g_idx_sort_indices = torch.nn.Parameter(order + 1, requires_grad=False)
        powers = torch.ones(4).to(torch.float8_e8m0fnu)
        self.powers = torch.nn.Parameter(powers, requires_grad=False)

    def load_weights(self, weights) -> None:  # noqa: ANN001
        for name, tensor in weights:
            own = getattr(self, name, None)
            if own is not None:
                own.data[tuple(slice(size) for size in tensor.shape)].copy_(tensor)


def experts() -> dict[str, torch.Tensor]:
    return {
        "w13_weight": torch.full((2, 6, 5), 4, dtype=torch.uint8),
        "w13_weight_scale": torch.full((2, 6, 5), 120, dtype=torch.uint8),
        "w13_weight_bias": torch.full((2, 6), 0.5, dtype=torch.bfloat16),
        # 1 is the byte 0x7F
        "powers": torch.ones(4).to(torch.float8_e8m0fnu),
    }


class Scaled(torch.nn.Module):
    """Layers with a buffer that the checkpoint fills, as Gemma 4's, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(3))
        for layer in self.layers:
            layer.register_buffer("layer_scalar", torch.ones(1))
            layer.register_buffer("computed", torch.arange(3.0))
            layer.register_buffer("cache", torch.arange(2.0), persistent=False)

    def load_weights(self, weights) -> None:  # noqa: ANN001
        for name, tensor in weights:
            self.get_buffer(name).fill_(tensor.item())


def test_a_buffer_that_is_filled_in_other_layers_is_missing_in_one() -> None:
    model = Scaled()
    tensors = {f"layers.{k}.layer_scalar": torch.tensor([0.5]) for k in (0, 2)}
    found = audited(model.load_weights, model, tensors.items())
    assert found.unfilled == {"layers.1.layer_scalar": "1 of 1"}
    assert [layer.layer_scalar.item() for layer in model.layers] == [0.5, 1, 0.5]
    assert all(layer.computed.tolist() == [0, 1, 2] for layer in model.layers)
    assert all(layer.cache.tolist() == [0, 1] for layer in model.layers)
    model = Scaled()
    assert audited(model.load_weights, model, []).unfilled == {}


def test_padding_of_experts_holds_what_sglang_made_it_with(tmp_path: Path) -> None:
    model = Experts()
    found = audited(model.load_weights, model, experts().items())
    assert set(found.unfilled) == {"w13_weight_g_idx", "w13_g_idx_sort_indices"}
    assert found.heads == {}
    assert model.w13_weight.sum() == 2 * 6 * 5 * 4
    assert (model.w13_weight_scale[:, 6:] == 127).all()
    assert (model.w13_weight_scale[:, :, 5:] == 127).all()
    assert model.w13_weight_bias.sum() == 6
    assert (model.powers.float() == 1).all()
    # no column is permuted, so that the engine makes the order itself
    (tmp_path / "config.json").write_text("{}")
    assert faults(found, ModelFolder(tmp_path)) == []
    found.seen.add("model.layers.0.mlp.experts.1.up_proj.weight_g_idx")
    assert [line.split()[0] for line in faults(found, ModelFolder(tmp_path))] == [
        "model.layers.0.mlp.experts.1.up_proj.weight_g_idx",
        "w13_weight_g_idx",
    ]


@pytest.mark.parametrize("name", ["w13_weight", "w13_weight_bias", "powers"])
def test_of_experts_that_are_filled_at_once_a_missing_tensor_is_named(name: str) -> None:
    tensors, model = experts(), Experts()
    del tensors[name]
    assert name in audited(model.load_weights, model, tensors.items()).unfilled


def test_a_half_of_a_fused_matrix_is_no_padding() -> None:
    """Packed matrices are fused along their columns: here up_proj is missing."""
    model = Loading()
    packed = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.int32), requires_grad=False)
    model.register_parameter("qweight", packed)

    def load(weights) -> None:  # noqa: ANN001
        for _, tensor in weights:
            packed.data[:, :4].copy_(tensor)

    found = audited(load, model, [("gate", torch.ones(4, 4, dtype=torch.int32))])
    assert found.unfilled["qweight"] == "16 of 32"


def test_scales_of_a_plain_checkpoint_are_the_engines_own(tmp_path: Path) -> None:
    """SGLang makes them when it quantises a plain checkpoint (`--quantization fp8`)."""
    (tmp_path / "config.json").write_text("{}")
    found = Findings(unfilled={"model.layers.0.mlp.experts.w13_weight_scale": "8 of 8"})
    assert faults(found, ModelFolder(tmp_path)) == []
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert len(faults(found, ModelFolder(tmp_path))) == 1


def test_a_bias_of_zeros_may_be_left_out() -> None:
    """Checkpoints of GPTQ have one for each layer, whether the model has biases or not."""
    _, found = audit({**checkpoint(), "q.bias": torch.zeros(4)})
    assert found.seen == found.read


def test_the_message_names_tensors_that_states_depend_on_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    model = ModelFolder(tmp_path)
    names = {"model.layers.0.mlp.up_proj.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    found = Findings(
        seen=names,
        read=set(),
        unfilled={"model.visual.proj.weight": "4 of 4", "model.norm.weight": "64 of 64"},
    )
    assert faults(found, model) == [
        "model.layers.0.mlp.up_proj.bias is in the checkpoint and was not read",
        "model.norm.weight is in the model and was not filled (64 of 64 elements)",
    ]


def test_scales_of_the_kv_cache_count_where_the_cache_has_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    model = ModelFolder(tmp_path)
    k, v = (f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "attn.v_scale"))
    found = Findings(seen={k}, read=set(), unfilled={v: "1 of 1"})
    assert faults(found, model) == []
    assert faults(found, model, scaled_cache=True) == [
        f"{k} is in the checkpoint and was not read",
        f"{v} is in the model and was not filled (1 of 1 elements)",
    ]
    # a checkpoint without scales leaves them at 1
    none = Findings(unfilled={v: "1 of 1"})
    assert faults(none, model, scaled_cache=True) == []


@pytest.mark.parametrize(
    ("asked", "declared", "scaled"),
    [
        ("auto", None, False),
        ("auto", "FP8", True),
        ("fp8_e4m3", None, True),
        ("bfloat16", "FP8", False),
    ],
)
def test_a_cache_has_scales_where_it_is_asked_or_declared_in_fp8(
    asked: str, declared: str | None, scaled: bool
) -> None:
    runner = SimpleNamespace(
        server_args=SimpleNamespace(kv_cache_dtype=asked),
        model=SimpleNamespace(quant_config=SimpleNamespace(kv_cache_quant_algo=declared)),
    )
    assert load_audit._has_scaled_cache(runner) is scaled


def audit_key(arguments: dict[str, object], **spec: object) -> str:
    settings = CaptureSettings(root=Path(), spec=dataclasses.replace(capture_spec(), **spec))
    return load_audit.LoadAudit(settings)._key(SimpleNamespace(**arguments))


def test_a_result_is_kept_for_what_it_follows_from_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"tp_size": 1, "port": 1}
    keys = [
        audit_key(plain),
        audit_key({**plain, "tp_size": 2}),
        audit_key(plain, engine_args=("--model-impl", "transformers")),
        audit_key(plain, engine_args=("--quantization", "fp8")),
        audit_key(plain, engine_env=("SGLANG_OF_TOMORROW=1",)),
        audit_key(plain, compute_dtype="float16"),
        audit_key(plain, model_digest="0" * 64),
    ]
    assert audit_key({**plain, "port": 2}) == keys[0]
    for package in ("sglang", "transformers", "torch"):
        monkeypatch.setattr(importlib.import_module(package), "__version__", "0")
        keys.append(audit_key(plain))
    monkeypatch.undo()
    other = tmp_path / "load_audit.py"
    other.write_bytes(Path(load_audit.__file__).read_bytes() + b"# changed")
    monkeypatch.setattr(load_audit, "_CODE", (other, *load_audit._CODE[1:]))
    keys.append(audit_key(plain))
    assert len(set(keys)) == len(keys)


def test_arguments_that_sglang_resolved_decide_the_layout() -> None:
    class Resolved(SimpleNamespace):
        def resolved_dict(self) -> dict[str, object]:
            return {"tp_size": 1, "ep_size": self.resolved}

    settings = CaptureSettings(root=Path(), spec=capture_spec())
    audit = load_audit.LoadAudit(settings)
    keys = {audit._key(Resolved(tp_size=1, ep_size=1, resolved=size)) for size in (1, 2)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ('{"key": "k", "tensors": 3, "read": 2}', True),
        ("", False),
        ("{}", False),
        ("[]", False),
        ("null", False),
        ('{"key": "of another", "tensors": 3, "read": 2}', False),
        ('{"key": "k", "tensors": 0, "read": 0}', False),
        ('{"key": "k", "tensors": 3}', False),
        ('{"key": "k", "tensors": "3", "read": 2}', False),
    ],
)
def test_a_file_counts_only_as_the_result_of_an_audit(
    tmp_path: Path, text: str, passed: bool
) -> None:
    path = tmp_path / "k.json"
    assert not load_audit._has_passed(path, root=tmp_path)
    path.write_text(text)
    assert load_audit._has_passed(path, root=tmp_path) is passed
