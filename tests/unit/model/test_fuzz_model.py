"""A model's files with any value changed or any bytes damaged: read as they are, or refused by
name.
"""

import json
from pathlib import Path

import pytest
from captured import tiny_model
from fuzz import changed, damaged
from hypothesis import given
from hypothesis import strategies as st

from draftstates.config import Configuration, resolve
from draftstates.errors import UserError
from draftstates.model.context import server_context
from draftstates.model.digest import configured_capture
from draftstates.model.folder import ModelFolder, check_model
from draftstates.model.head import read_head
from draftstates.workflow import parity_seconds

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "vocab_size": 400,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    "sliding_window": 1024,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("fuzz") / "model")


def configuration(model: Path) -> Configuration:
    return resolve(
        {
            "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 64},
            "model": {"path": str(model), "name": "tiny"},
            "capture": {"residual_layers": [1, 2]},
        },
        origin="my.yaml",
    )


def read(model: Path) -> None:
    """Ask all that the workflow asks of a model's folder; it may be refused by name."""
    config, folder = configuration(model), ModelFolder(model)
    for ask in (
        lambda: check_model(config),
        lambda: configured_capture(config, folder),
        lambda: server_context(config),
        lambda: parity_seconds(config),
        lambda: (folder.dtype, folder.end_ids, folder.quantization, folder.vocab_size),
        lambda: read_head(folder, final_norm="post_norm"),
    ):
        try:
            ask()
        except UserError as error:
            assert str(model) in str(error) or "capture." in str(error) or "data." in str(error)


@given(document=changed(CONFIG))
def test_a_config_with_any_value_changed_is_read_or_refused_by_name(
    model: Path, document: object
) -> None:
    whole = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps(document))
    try:
        read(model)
    finally:
        (model / "config.json").write_text(whole)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_by_name(
    model: Path, name: str, data: st.DataObject
) -> None:
    path = model / name
    whole = path.read_bytes()
    path.write_bytes(data.draw(damaged(whole[:600])) + whole[600:])
    try:
        read(model)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "", "\ufeff{}", "{}"])
def test_a_config_that_is_none_is_refused_by_name(model: Path, content: str) -> None:
    whole = (model / "config.json").read_text()
    (model / "config.json").write_text(content)
    try:
        with pytest.raises(UserError, match="config.json"):
            check_model(configuration(model))
    finally:
        (model / "config.json").write_text(whole)
