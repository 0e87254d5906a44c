"""A model is what its files hold: a digest follows content, never a path or a date; the capture key
follows the model's digest.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from model_folders import CONFIG, HIDDEN, make, tensors
from safetensors.torch import save_file

from draftstates.errors import UserError
from draftstates.model.digest import (
    _TOKENIZER_IN_DIGEST,
    capture_spec,
    check_content,
    model_digest,
    tokenizer_digest,
)
from draftstates.model.folder import ModelFolder
from draftstates.spec import eagle3_layers

CAPTURE = {
    "residual_layers": "eagle3",
    "final_norm": "post_norm",
    "stored_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
}


def test_the_digest_ignores_path_dates_and_origin(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    second = ModelFolder(shutil.copytree(first.path, tmp_path / "elsewhere" / "b"))
    os.utime(second.path / "model.safetensors", (0, 0))
    config = {**CONFIG, "_name_or_path": "/somewhere", "transformers_version": "9"}
    second.config_path.write_text(json.dumps(config, indent=1))
    assert model_digest(first) == model_digest(second)


@pytest.mark.parametrize("changed", ["weights", "one tensor", "config", "tokenizer"])
def test_the_digest_follows_content(tmp_path: Path, changed: str) -> None:
    model = make(tmp_path / "a")
    weights = model.path / "model.safetensors"
    before, date = model_digest(model), os.stat(weights).st_mtime_ns
    if changed == "weights":
        save_file({name: tensor + 1 for name, tensor in tensors().items()}, weights)
    elif changed == "one tensor":
        save_file({**tensors(), "model.norm.weight": torch.zeros(HIDDEN)}, weights)
    elif changed == "config":
        model.config_path.write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    else:
        (model.path / "tokenizer.json").write_text('{"a": 1}')
    os.utime(weights, ns=(date, date))
    assert model_digest(model) != before


@pytest.mark.parametrize("name", sorted(_TOKENIZER_IN_DIGEST))
def test_each_tokenizer_file_of_the_models_digest_enters_both_digests(
    tmp_path: Path, name: str
) -> None:
    model = make(tmp_path / "a")
    before = model_digest(model), tokenizer_digest(model)
    (model.path / name).write_text('{"a": 1}')
    after = model_digest(model), tokenizer_digest(model)
    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "vocab.txt",
        "spiece.model",
        "qwen.tiktoken",
        "tokenization_kimi.py",
        "additional_chat_templates/chat_template.jinja",
    ],
)
def test_other_tokenizer_files_enter_the_tokenizers_digest_alone(tmp_path: Path, name: str) -> None:
    model = make(tmp_path / "a")
    whole, tokenizer = model_digest(model), tokenizer_digest(model)
    (model.path / name).parent.mkdir(exist_ok=True)
    (model.path / name).write_text('{"eos_token_id": 7}')
    assert model_digest(model) == whole
    assert tokenizer_digest(model) != tokenizer


def test_weights_do_not_enter_the_tokenizers_digest(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    before = tokenizer_digest(model)
    (model.path / "model.safetensors").write_text("others")
    assert tokenizer_digest(model) == before


def test_a_large_file_is_sampled_over_all_its_length(tmp_path: Path) -> None:
    large = {"lm_head.weight": torch.zeros(2_000_000)}
    model = make(tmp_path / "a", weights=large)
    before = model_digest(model)
    for part in range(4):
        large["lm_head.weight"][:] = 0
        large["lm_head.weight"][part * 500_000 : (part + 1) * 500_000] = 1
        save_file(large, model.path / "model.safetensors")
        assert model_digest(model) != before


def test_a_change_of_any_one_tensor_is_seen(tmp_path: Path) -> None:
    """As many small ones as a small model has: blocks spread over the file alone would miss most of
    them.
    """
    model = make(
        tmp_path / "a", weights={f"{number:03d}": torch.zeros(4096) for number in range(300)}
    )
    file = model.path / "model.safetensors"
    whole, before = file.read_bytes(), model_digest(model)
    for number in range(300):
        end = len(whole) - number * 4 * 4096
        file.write_bytes(whole[: end - 4 * 4096] + b"\x01" * 4 * 4096 + whole[end:])
        assert model_digest(model) != before


def test_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = make(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / commit)
    assert model_digest(model) == f"commit-{commit}"
    (tmp_path / "link").symlink_to(model.path)
    assert model_digest(ModelFolder(tmp_path / "link")) == f"commit-{commit}"


def test_a_file_with_another_header_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    (model.path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]")
    with pytest.raises(UserError, match="model.safetensors: not a readable safetensors file"):
        model_digest(model)


def test_another_model_than_the_captured_one_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    check_content(model, expected=model_digest(model))
    with pytest.raises(
        UserError,
        match=r"a: not the captured model: expected content commit-1, found content-.*plan again",
    ):
        check_content(model, expected="commit-1")


def test_eagle3_layers_are_2_half_and_n_minus_3() -> None:
    assert eagle3_layers(61) == (2, 30, 58)
    assert eagle3_layers(36) == (2, 18, 33)
    with pytest.raises(UserError, match="at least 7 layers"):
        eagle3_layers(6)


def test_the_capture_key_follows_content_and_not_the_name(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    spec = capture_spec(model, name=None, capture=CAPTURE)
    assert (spec.model, spec.residual_layers) == ("a", (2, 4, 5))
    assert spec.key == capture_spec(model, name="other", capture=CAPTURE).key
    others = {**CAPTURE, "residual_layers": [1]}
    assert spec.key != capture_spec(model, name=None, capture=others).key
    with pytest.raises(UserError, match=r"expected k in 0..8"):
        capture_spec(model, name=None, capture={**CAPTURE, "residual_layers": [9]})
