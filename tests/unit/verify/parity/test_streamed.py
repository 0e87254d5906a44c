"""Promise 5's reference: a streamed forward pass equals transformers' ordinary one."""

import json
from pathlib import Path

import parity_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.verify.parity.streamed import NoReference, StreamedModel


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity_models.make("qwen3", tmp_path_factory.mktemp("qwen3"))


def change_tensors(folder: Path, change: object) -> None:
    """Rewrite the files of a checkpoint with `change(name, tensor)`: a dict of what stays."""
    for file in folder.glob("*.safetensors"):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file).items():
            tensors |= change(name, tensor)
        save_file(tensors, file, metadata={"format": "pt"})


def copy(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("family", sorted(parity_models.FAMILIES))
def test_a_streamed_forward_pass_equals_the_ordinary_one(family: str, tmp_path: Path) -> None:
    folder = parity_models.make(family, tmp_path)
    input_ids = parity_models.ids(40)
    model = StreamedModel(ModelFolder(folder))
    found = model.states(input_ids)
    right = parity_models.ordinary_states(folder, input_ids)
    assert found.reason is None
    assert found.by_name.keys() == right.keys()
    assert [name for name in right if not torch.equal(found.by_name[name], right[name])] == []
    assert not torch.equal(right["r_0"], right["r_4"])
    assert all(parameter.is_meta for parameter in model._model.parameters())


def test_a_second_prompt_through_the_same_model_equals_the_first(qwen3: Path) -> None:
    model = StreamedModel(ModelFolder(qwen3))
    first, second = (model.states(parity_models.ids(9)).by_name for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_the_first_layers_are_computed_where_so_many_are_asked_for(qwen3: Path) -> None:
    model, input_ids = StreamedModel(ModelFolder(qwen3)), parity_models.ids(9)
    found = model.states(input_ids, layers=2).by_name
    assert sorted(found) == ["r_0", "r_1", "r_2"]
    whole = model.states(input_ids).by_name
    assert all(torch.equal(found[name], whole[name]) for name in found)


def without_up_proj(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {} if name == "model.layers.2.mlp.up_proj.weight" else {name: tensor}


def with_a_bias(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    bias = {"model.layers.1.mlp.up_proj.bias": tensor[:, 0].clone()} if "1.mlp.up" in name else {}
    return {name: tensor, **bias}


def cut(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor[:-1].clone() if "1.mlp.up" in name else tensor}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_up_proj, "model.layers.2.mlp.up_proj.weight is missing from the checkpoint"),
        (with_a_bias, "model.layers.1.mlp.up_proj.bias is unknown to transformers"),
        (cut, "has another shape than transformers expects"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused_by_tensor(
    qwen3: Path, tmp_path: Path, change: object, expected: str
) -> None:
    folder = copy(qwen3, tmp_path)
    change_tensors(folder, change)
    with pytest.raises(UserError, match="use a checkpoint that fits its config.json") as caught:
        StreamedModel(ModelFolder(folder)).states(parity_models.ids(5))
    assert expected in str(caught.value)


def test_tensors_that_no_state_depends_on_are_left_out(qwen3: Path, tmp_path: Path) -> None:
    """Older checkpoints hold rotary caches; draft layers lie behind the last layer."""
    folder = copy(qwen3, tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.4.mlp.up_proj.weight": torch.ones(2, 2),
        "mtp.fc.weight": torch.ones(2, 2),
    }
    save_file(extra, folder / "more.safetensors", metadata={"format": "pt"})
    input_ids = parity_models.ids(5)
    found = StreamedModel(ModelFolder(folder)).states(input_ids).by_name
    right = StreamedModel(ModelFolder(qwen3)).states(input_ids).by_name
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "of_nobody"}, "transformers cannot read the configuration"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method gptq"),
        ({"num_hidden_layers": 4, "model_type": "bert"}, "has no stack of 4 decoder layers|cannot"),
    ],
)
def test_a_model_without_a_reference_says_why(
    qwen3: Path, tmp_path: Path, values: dict, reason: str
) -> None:
    folder = copy(qwen3, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(NoReference, match=reason):
        StreamedModel(ModelFolder(folder)).states(parity_models.ids(5))


@pytest.mark.parametrize(
    "problem",
    [
        OSError(5, "Input/output error"),
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_fault_of_the_machine_is_no_result(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """It says nothing about the later layers, and a second attempt may go well."""
    model = StreamedModel(ModelFolder(qwen3))
    read = model._open

    def failing(unit: str, opened: object) -> dict:
        if unit.endswith("layers.2"):
            raise problem
        return read(unit, opened)

    monkeypatch.setattr(model, "_open", failing)
    with pytest.raises(UserError, match=f"found {type(problem).__name__}: .*run again"):
        model.states(parity_models.ids(9))
