"""A model is what its files hold: a digest follows content, never a path or a date; the capture key
follows the model's digest.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from model_folders import CONFIG, HIDDEN, make, tensors
from safetensors.torch import save_file

from draftstates.errors import UserError
from draftstates.model import weight_files
from draftstates.model.digest import (
    capture_spec,
    check_content,
    model_digest,
    tokenizer_digest,
)
from draftstates.model.folder import ModelFolder

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


@pytest.mark.parametrize("changed", ["weights", "one tensor", "config"])
def test_the_digest_follows_content(tmp_path: Path, changed: str) -> None:
    model = make(tmp_path / "a")
    weights = model.path / "model.safetensors"
    before, date = model_digest(model), os.stat(weights).st_mtime_ns
    if changed == "weights":
        save_file({name: tensor + 1 for name, tensor in tensors().items()}, weights)
    elif changed == "one tensor":
        save_file({**tensors(), "model.norm.weight": torch.zeros(HIDDEN)}, weights)
    else:
        model.config_path.write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    os.utime(weights, ns=(date, date))
    assert model_digest(model) != before


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "hf_quant_config.json",
        "quantize_config.json",
        "model.safetensors.index.json",
        "params.json",
        "modeling_kimi.py",
        "remote/attention.py",
    ],
)
def test_what_decides_the_numbers_beside_the_weights_enters_the_digest(
    tmp_path: Path, name: str
) -> None:
    model = make(tmp_path / "a")
    file = model.path / name
    file.parent.mkdir(exist_ok=True)
    found = [model_digest(model)]
    for number in (1, 2):
        file.write_text(f'{{"a": {number}, "weight_map": {{"x": "model.safetensors"}}}}')
        found.append(model_digest(model))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        "qwen.tiktoken",
        "additional_chat_templates/chat_template.jinja",
    ],
)
def test_tokenizer_and_template_enter_the_tokenizers_digest_alone(
    tmp_path: Path, name: str
) -> None:
    """Samples hold ids: another template tokenises again, and captures what has other ids."""
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


@pytest.mark.parametrize("stacked", [False, True])
def test_a_change_of_any_one_expert_is_seen(tmp_path: Path, stacked: bool) -> None:
    """As many as a file of a large mixture of experts has, or all of them in one tensor."""
    experts = torch.ones(2048, 4, 600)
    weights = {f"experts.{number}.weight": each for number, each in enumerate(experts.clone())}
    model = make(tmp_path / "a", weights={"experts": experts} if stacked else weights)
    file = model.path / "model.safetensors"
    whole, before = file.read_bytes(), model_digest(model)
    start, width = len(whole) - experts.nbytes, experts[0].nbytes
    for number in range(0, 2048, 97):
        first = start + number * width
        with open(file, "r+b") as opened:
            for content, same in ((bytes(width), False), (whole[first : first + width], True)):
                opened.seek(first)
                opened.write(content)
                opened.flush()
                assert (model_digest(model) == before) is same


def test_a_large_models_digests_are_kept_for_as_long_as_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = make(tmp_path / "a"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    before = model_digest(model)
    assert not cache.exists()
    monkeypatch.setattr(weight_files, "_KEPT_BYTES", 0)
    assert model_digest(model) == before
    file = model.path / "model.safetensors"
    assert not cache.exists(), "kept of a file that was changed just now"
    monkeypatch.setattr(weight_files, "_SETTLED_SECONDS", -1.0)
    assert model_digest(model) == before
    kept = next(cache.rglob("*.json"))
    assert len(json.loads(kept.read_text())["digests"]) == 1
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "_sampled", None)
        assert model_digest(model) == before, "the blocks were read again"
    # The same size and date, written in place.
    date = file.stat().st_mtime_ns
    content = file.read_bytes()
    with open(file, "r+b") as opened:
        opened.seek(len(content) - 64)
        opened.write(bytes(64))
    os.utime(file, ns=(date, date))
    assert model_digest(model) != before
    for content in ("[]", '{"digests": {"x": 1}}', "", '{"digests": []}'):
        kept.write_text(content)
        model_digest(model)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(folder: Path, *, commit: str = COMMIT) -> ModelFolder:
    """Write a model in the layout of a hub cache: a snapshot of links into `blobs`."""
    made = make(folder / "made")
    snapshot = folder / "models--a--b" / "snapshots" / commit
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for file in made.path.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return ModelFolder(snapshot)


def test_in_a_hub_cache_the_hash_of_the_whole_weights_enters(tmp_path: Path) -> None:
    model = make_cache(tmp_path)
    before = model_digest(model)
    assert before.startswith("hub-")
    (tmp_path / "link").symlink_to(model.path)
    assert model_digest(ModelFolder(tmp_path / "link")) == before
    weights = model.path / "model.safetensors"
    other = weights.resolve().with_name("0" * 64)
    shutil.copy(weights, other)
    weights.unlink()
    weights.symlink_to(other)
    assert model_digest(model) != before


def test_another_commit_with_the_same_model_is_the_same_model(tmp_path: Path) -> None:
    """A commit that changes the chat template alone captures nothing again."""
    first = make_cache(tmp_path / "first")
    second = make_cache(tmp_path / "second", commit="f" * 40)
    (second.path / "chat_template.jinja").write_text("{# a comment #}")
    assert model_digest(first) == model_digest(second)


def test_a_folder_that_is_only_named_like_a_hub_cache_is_told_by_its_content(
    tmp_path: Path,
) -> None:
    places = [tmp_path / name / "snapshots" / COMMIT for name in ("one", "two")]
    first, second = make(places[0]), make(places[1], weights={"a": torch.zeros(8)})
    assert model_digest(first).startswith("content-")
    assert model_digest(first) != model_digest(second)


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


def test_the_capture_key_follows_content_and_not_the_name(tmp_path: Path) -> None:
    model = make(tmp_path / "a")
    spec = capture_spec(model, name=None, capture=CAPTURE)
    assert (spec.model, spec.residual_layers) == ("a", (2, 4, 5))
    assert spec.key == capture_spec(model, name="other", capture=CAPTURE).key
    quantised = {"engine_args": ["--kv-cache-dtype", "fp8_e4m3"]}
    assert spec.key != capture_spec(model, name=None, capture=CAPTURE, **quantised).key
    exact = {"engine_env": {"NVIDIA_TF32_OVERRIDE": "0"}}
    assert spec.key != capture_spec(model, name=None, capture=CAPTURE, **exact).key
    others = {**CAPTURE, "residual_layers": [1]}
    assert spec.key != capture_spec(model, name=None, capture=others).key
    layers_alone = {**CAPTURE, "final_state": False}
    assert spec.key != capture_spec(model, name=None, capture=layers_alone).key
    with pytest.raises(UserError, match="nothing to capture"):
        capture_spec(model, name=None, capture={**layers_alone, "residual_layers": []})
    with pytest.raises(UserError, match=r"expected k in 0..8"):
        capture_spec(model, name=None, capture={**CAPTURE, "residual_layers": [9]})
