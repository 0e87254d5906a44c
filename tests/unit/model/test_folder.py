"""A model's folder has one reader: its values, and an error that names file, expected and found."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import HIDDEN, VOCAB, make, make_wrapped
from safetensors.torch import save_file

from draftstates import config
from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder, check_model


def test_the_config_gives_layers_width_and_dtype(tmp_path: Path) -> None:
    model = make(tmp_path / "tiny")
    assert (model.name, model.num_layers, model.hidden_size, model.vocab_size) == (
        "tiny",
        8,
        HIDDEN,
        VOCAB,
    )
    assert (model.dtype, model.quantization) == ("bfloat16", None)
    assert model.model_type == "llama"


def test_a_wrapper_is_read_through_to_its_text_model(tmp_path: Path) -> None:
    model = make_wrapped(tmp_path / "wrapped")
    assert (model.num_layers, model.quantization) == (61, "compressed-tensors")
    assert model.model_type == "deepseek_v3"


def test_an_older_file_calls_the_dtype_torch_dtype(tmp_path: Path) -> None:
    model = make(tmp_path / "a", config={"dtype": None, "torch_dtype": "float16"})
    assert model.dtype == "float16"


def test_a_hub_snapshot_has_the_models_name(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = make(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / commit)
    assert model.name == "Qwen3-8B"


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2}}, 8192),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({}, None),
    ],
)
def test_the_context_length_is_the_one_that_sglang_derives(
    tmp_path: Path, config: dict, longest: int | None
) -> None:
    assert make(tmp_path / "a", config=config).context_length == longest


def test_a_quantisation_in_modelopts_own_file_is_seen(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    assert model.quantization is None
    (model.path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert model.quantization == "modelopt"


def test_end_ids_come_from_both_files_as_number_or_list(tmp_path: Path) -> None:
    model = make(tmp_path / "a", config={"eos_token_id": 2})
    assert model.end_ids == {2}
    (model.path / "generation_config.json").write_text('{"eos_token_id": [2, 7, null]}')
    assert model.end_ids == {2, 7}


def test_a_folder_with_a_tokenizer_alone_names_no_end_ids(tmp_path: Path) -> None:
    assert not ModelFolder(tmp_path).exists()
    assert ModelFolder(tmp_path).end_ids == frozenset()


def test_tokenizer_files_are_all_that_decide_tokens_and_no_weights(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    names = [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "qwen.tiktoken",
        "tiktoken.model",
        "tokenization_kimi.py",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    for name in names:
        (model.path / name).parent.mkdir(exist_ok=True)
        (model.path / name).touch()
    (model.path / "tokenizer_of_another").mkdir()
    (model.path / "README.md").touch()
    found = [file.relative_to(model.path).as_posix() for file in model.tokenizer_files]
    assert found == names


def test_a_tensor_is_found_by_its_whole_name_in_any_file(tmp_path: Path) -> None:
    model = make(tmp_path / "a", weights={"one.weight": torch.zeros(1)})
    save_file({"two.weight": torch.ones(2)}, model.path / "zz.safetensors")
    assert torch.equal(model.tensor(re.compile(r"two\.weight")), torch.ones(2))
    assert model.tensor(re.compile(r"two")) is None


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    (model.path / "model.safetensors").rename(model.path / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"a: expected weights as \*.safetensors, found pytorch_model.bin: put"
    ):
        _ = model.weight_files


def test_the_files_of_the_index_are_the_weights(tmp_path: Path) -> None:
    model = make(tmp_path / "a", weights={"one.weight": torch.zeros(1)})
    one = model.path / "model.safetensors"
    # Mistral's folders hold all weights once more, under names of its own
    twice = model.path / "consolidated.safetensors"
    save_file({"output.weight": torch.ones(2)}, twice)
    assert model.weight_files == [one]
    two = model.path / "model-2.safetensors"
    save_file({"two.weight": torch.ones(2)}, two)
    assert model.weight_files == [twice, two, one]
    index = model.path / "model.safetensors.index.json"
    names = {"one.weight": one.name, "two.weight": two.name}
    index.write_text(json.dumps({"weight_map": names}))
    assert model.weight_files == [two, one]
    assert model.tensor(re.compile(r"output\.weight")) is None
    two.unlink()
    with pytest.raises(UserError, match=r"a: expected the 2 files .* no model-2.safetensors: down"):
        _ = model.weight_files
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index.json: expected weight_map, a mapping of tensors"):
        _ = model.weight_files


def test_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    file = model.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="model.safetensors: not a readable safetensors file"):
        model.tensor(re.compile("x"))


def test_a_folder_without_a_config_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no config.json in it: put .*hf download"):
        _ = ModelFolder(tmp_path).num_layers


def test_the_remedy_for_a_folder_of_the_presets_names_no_organisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    remedy = "hf download <organisation>/Qwen3-8B --local-dir .*models/Qwen3-8B"
    with pytest.raises(UserError, match=remedy):
        _ = ModelFolder(Path("models/Qwen3-8B")).num_layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json: expected JSON of a model, found JSONDecodeError"),
        ("[]", r"config.json: expected a mapping, found list"),
        ('{"text_config": 1}', r"config.json: expected text_config, a mapping, found 1"),
        ("{}", r"config.json: expected num_hidden_layers, a whole number above 0, found no such"),
        (
            '{"num_hidden_layers": "8"}',
            r"config.json: expected num_hidden_layers, a whole number above 0, found '8': use",
        ),
        ('{"num_hidden_layers": 0}', r"expected num_hidden_layers, .*, found 0: use"),
    ],
)
def test_a_config_of_another_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        _ = ModelFolder(tmp_path).num_layers


@pytest.mark.parametrize(
    ("field", "key", "value"),
    [
        ("quantization", "quantization_config", "fp8"),
        ("hidden_size", "hidden_size", None),
        ("vocab_size", "vocab_size", 5.5),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(
    tmp_path: Path, field: str, key: str, value: Any
) -> None:
    model = make(tmp_path / "a", config={key: value})
    with pytest.raises(UserError, match=f"config.json: expected {key}, "):
        getattr(model, field)


def test_a_generation_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    (model.path / "generation_config.json").write_text(json.dumps([2]))
    with pytest.raises(UserError, match="generation_config.json: expected a mapping, found list"):
        _ = model.end_ids


def configured(
    model: Path,
    *,
    layers: object = "eagle3",
    prepare: str = "none",
    max_tokens: int = 8,
    args: tuple[str, ...] = (),
) -> Any:
    """Return a configuration of a model and its layers."""
    raw = {
        "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": max_tokens},
        "server": {"args": list(args)},
        "model": {"path": str(model), "prepare": prepare},
        "capture": {"residual_layers": layers},
    }
    return config.resolve(raw, origin="my.yaml")


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "text_config"])
def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path, wrapped: bool) -> None:
    layers = {"num_hidden_layers": 6}
    text = json.dumps({"text_config": layers} if wrapped else layers)
    (tmp_path / "config.json").write_text(text)
    for chosen, expected in (
        ([2, 7], r"expected k in 0\.\.6, .* found \[2, 7\]"),
        ("eagle3", "eagle3 needs at least 7 layers"),
        ({"dflash": 4}, "dflash with 4 layers needs a model of at least 7 layers"),
    ):
        with pytest.raises(UserError, match=f"^capture.residual_layers: {expected}"):
            check_model(configured(tmp_path, layers=chosen))
    check_model(configured(tmp_path, layers=[2, 6]))


def test_a_model_that_no_rule_makes_is_refused_where_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model.path: .*found no config.json .*hf download"):
        check_model(configured(tmp_path))
    check_model(configured(tmp_path, prepare="smollm2"))


@pytest.mark.parametrize(
    "text",
    [b"", b"[1, 2]", b"\xff\x00", b"{}", b'{"num_hidden_layers": "six"}', b'{"text_config": 3}'],
)
def test_a_model_that_cannot_be_read_is_refused_before_anything_runs(
    tmp_path: Path, text: bytes
) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match="^model.path: .*config.json"):
        check_model(configured(tmp_path))


def test_samples_that_the_server_would_refuse_for_their_length_are_refused(tmp_path: Path) -> None:
    """It generates one token behind each sample."""
    folder = make(tmp_path / "a", config={"max_position_embeddings": 64}).path
    check_model(configured(folder, max_tokens=63))
    with pytest.raises(UserError, match=r"data.max_tokens: expected less than 64, the context len"):
        check_model(configured(folder, max_tokens=64))
    less = ("--context-length", "32")
    with pytest.raises(UserError, match=r"less than 32, .*--context-length in server.args"):
        check_model(configured(folder, max_tokens=63, args=less))


def test_code_of_another_repository_is_refused_where_code_is_trusted(tmp_path: Path) -> None:
    named = {"AutoModelForCausalLM": "org/base--modeling_x.Model", "AutoConfig": "config_x.Config"}
    folder = make(tmp_path / "a", config={"auto_map": named}).path
    config = configured(folder)
    check_model(config)
    trusting = config.model.model_copy(update={"trust_remote_code": True})
    with pytest.raises(UserError, match=r"names code of another repository \(org/base--modeling_x"):
        check_model(config.model_copy(update={"model": trusting}))


def test_code_is_what_the_folder_holds_or_its_config_names(tmp_path: Path) -> None:
    model = make(tmp_path / "a", config={"auto_map": {"AutoConfig": "config_x.Config"}})
    assert model.code == ["config_x.Config"]
    (model.path / "modeling_x.py").write_text("")
    assert model.code == ["modeling_x.py", "config_x.Config"]
    assert make(tmp_path / "b").code == []


def test_samples_beyond_the_length_that_turns_a_whole_batch_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    lengths = {"max_position_embeddings": 640, "rope_scaling": rope}
    folder = make(tmp_path / "a", config=lengths).path
    check_model(configured(folder, max_tokens=40))
    with pytest.raises(
        UserError, match=r"data.max_tokens: expected at most 40, found 41.*longrope"
    ):
        check_model(configured(folder, max_tokens=41))


def test_a_hybrid_model_is_refused_where_prefixes_are_to_be_reused(tmp_path: Path) -> None:
    found = {"num_hidden_layers": 8, "layer_types": ["linear_attention", "full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(found))
    config = configured(tmp_path)
    check_model(config)
    capture = config.capture.model_copy(update={"reuse_prefixes": True})
    with pytest.raises(UserError, match=r"^model.path: .*linear_attention.*reuse_prefixes: false"):
        check_model(config.model_copy(update={"capture": capture}))
