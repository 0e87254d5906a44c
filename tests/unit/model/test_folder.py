"""A model is what its files hold: the digest follows content, never a path or a date; the head is found or refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftstates.errors import UserError
from draftstates.layers import eagle3_layers
from draftstates.model import capture_spec, digest, read_head, read_model

HIDDEN, VOCAB = 16, 50
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CAPTURE = {"residual_layers": "eagle3", "final_norm": "post_norm", "stored_dtype": "bfloat16", "compute_dtype": "bfloat16"}


def _tensors(prefix: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{prefix}model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        f"{prefix}model.layers.8.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        f"{prefix}model.norm.weight": torch.rand(HIDDEN, generator=generator),
        f"{prefix}lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
    }


def _model(folder: Path, *, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def test_the_config_gives_layers_width_and_dtype(tmp_path: Path) -> None:
    info = read_model(_model(tmp_path / "tiny"))
    assert (info.name, info.num_layers, info.hidden_size, info.vocab_size) == ("tiny", 8, HIDDEN, VOCAB)
    assert (info.dtype, info.quantization, info.architecture) == ("bfloat16", None, "LlamaForCausalLM")


def test_a_wrapper_is_read_through_to_its_text_model(tmp_path: Path) -> None:
    text = {**CONFIG, "model_type": "deepseek_v3", "num_hidden_layers": 61, "quantization_config": {"quant_method": "compressed-tensors"}}
    folder = _model(tmp_path / "wrapped", tensors=_tensors("language_model."))
    (folder / "config.json").write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}))
    info = read_model(folder)
    assert (info.num_layers, info.quantization) == (61, "compressed-tensors")
    head = read_head(folder, final_norm="pre_norm")
    assert torch.equal(head.weight, _tensors()["lm_head.weight"])
    assert head.norm is not None
    assert torch.equal(head.norm.weight, _tensors()["model.norm.weight"])


def test_the_digest_ignores_path_dates_and_origin(tmp_path: Path) -> None:
    first = _model(tmp_path / "a")
    second = shutil.copytree(first, tmp_path / "elsewhere" / "b")
    os.utime(second / "model.safetensors", (0, 0))
    config = {**CONFIG, "_name_or_path": "/somewhere", "transformers_version": "9"}
    (second / "config.json").write_text(json.dumps(config, indent=1))
    assert digest(first) == digest(second)


@pytest.mark.parametrize("changed", ["weights", "one tensor", "config", "tokenizer"])
def test_the_digest_follows_content(tmp_path: Path, changed: str) -> None:
    folder = _model(tmp_path / "a")
    before, date = digest(folder), os.stat(folder / "model.safetensors").st_mtime_ns
    if changed == "weights":
        save_file({name: tensor + 1 for name, tensor in _tensors().items()}, folder / "model.safetensors")
    elif changed == "one tensor":
        save_file({**_tensors(), "model.norm.weight": torch.zeros(HIDDEN)}, folder / "model.safetensors")
    elif changed == "config":
        (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    else:
        (folder / "tokenizer.json").write_text('{"a": 1}')
    os.utime(folder / "model.safetensors", ns=(date, date))
    assert digest(folder) != before


def test_a_large_file_is_sampled_over_all_its_length(tmp_path: Path) -> None:
    large = {"lm_head.weight": torch.zeros(2_000_000)}
    folder = _model(tmp_path / "a", tensors=large)
    before = digest(folder)
    for part in range(4):
        large["lm_head.weight"][:] = 0
        large["lm_head.weight"][part * 500_000 : (part + 1) * 500_000] = 1
        save_file(large, folder / "model.safetensors")
        assert digest(folder) != before


def test_a_change_of_any_one_tensor_is_seen(tmp_path: Path) -> None:
    """As many small ones as a small model has: blocks spread over the file alone would miss most of them."""
    folder = _model(tmp_path / "a", tensors={f"{number:03d}": torch.zeros(4096) for number in range(300)})
    file = folder / "model.safetensors"
    whole, before = file.read_bytes(), digest(folder)
    for number in range(300):
        end = len(whole) - number * 4 * 4096
        file.write_bytes(whole[: end - 4 * 4096] + b"\x01" * 4 * 4096 + whole[end:])
        assert digest(folder) != before


def test_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = _model(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / commit)
    assert digest(folder) == f"commit-{commit}"
    assert read_model(folder).name == "Qwen3-8B"
    (tmp_path / "link").symlink_to(folder)
    assert digest(tmp_path / "link") == f"commit-{commit}"


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    folder = _model(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"expected weights as \*.safetensors, found pytorch_model.bin"):
        read_model(folder)


def test_a_folder_without_a_config_and_a_config_without_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a model folder with config.json"):
        read_model(tmp_path)
    folder = _model(tmp_path / "a")
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    with pytest.raises(UserError, match="missing 'num_hidden_layers'"):
        read_model(folder)


def test_a_tied_head_is_the_embeddings_and_an_untied_one_without_weight_is_refused(tmp_path: Path) -> None:
    tensors = _tensors()
    del tensors["lm_head.weight"]
    tied = _model(tmp_path / "tied", config={"tie_word_embeddings": True}, tensors=tensors)
    assert torch.equal(read_head(tied, final_norm="post_norm").weight, tensors["model.embed_tokens.weight"])
    untied = _model(tmp_path / "untied", tensors=tensors)
    with pytest.raises(UserError, match="no safetensors file holds lm_head.weight"):
        read_head(untied, final_norm="post_norm")


def test_a_padded_head_is_cut_to_the_vocabulary(tmp_path: Path) -> None:
    head = read_head(_model(tmp_path / "a", config={"vocab_size": 40}), final_norm="post_norm")
    assert tuple(head.weight.shape) == (40, HIDDEN)
    assert head.norm is None


def test_heads_and_norms_that_cannot_be_followed_are_refused_with_the_reason(tmp_path: Path) -> None:
    quantised = _model(tmp_path / "q", tensors={**_tensors(), "lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)})
    with pytest.raises(UserError, match=r"lm_head is quantised \(torch.int8"):
        read_head(quantised, final_norm="post_norm")
    capped = _model(tmp_path / "c", config={"final_logit_softcapping": 30.0})
    with pytest.raises(UserError, match="final_logit_softcapping: 30.0"):
        read_head(capped, final_norm="post_norm")
    gemma = _model(tmp_path / "g", config={"model_type": "gemma2"})
    with pytest.raises(UserError, match="final norm of model_type 'gemma2' is not known"):
        read_head(gemma, final_norm="pre_norm")


def test_eagle3_layers_are_2_half_and_n_minus_3() -> None:
    assert eagle3_layers(61) == (2, 30, 58)
    assert eagle3_layers(36) == (2, 18, 33)
    with pytest.raises(UserError, match="at least 7 layers"):
        eagle3_layers(6)


def test_the_capture_key_follows_content_and_not_the_name(tmp_path: Path) -> None:
    info = read_model(_model(tmp_path / "a"))
    spec = capture_spec(info, name=None, capture=CAPTURE)
    assert spec.residual_layers == (2, 4, 5)
    assert spec.key == capture_spec(info, name="other", capture=CAPTURE).key
    assert spec.key != capture_spec(info, name=None, capture={**CAPTURE, "residual_layers": [1]}).key
    with pytest.raises(UserError, match=r"expected k in 0..8"):
        capture_spec(info, name=None, capture={**CAPTURE, "residual_layers": [9]})
