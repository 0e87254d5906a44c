"""A model on the disk: what it is called, what it is by content, and the parts that check a captured state.

It imports torch, which takes seconds, only for those parts: every run of Snakemake asks for the content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from draftstates.capture_spec import CaptureSpec
from draftstates.errors import UserError
from draftstates.layers import chosen_layers

if TYPE_CHECKING:
    import torch

    from draftstates.final_norm import FinalNorm

_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_NOT_CONTENT = ("_name_or_path", "name_or_path", "_model_name_or_path", "transformers_version")  # where from and who wrote it
# Sampled of each weight file: milliseconds, where reading a large model whole takes minutes.
_BLOCKS, _BLOCK_BYTES = 64, 4096
_TENSORS = 320  # more than a model of one file has, but for mixtures of experts
_HEAD_NAMES = re.compile(r"(.+\.)?lm_head\.weight")
_EMBEDDING_NAMES = re.compile(r"(?!.*\.layers\.)(.+\.)?embed_tokens\.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What `config.json` says of the text model, and the digest of the whole folder."""

    name: str
    digest: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str | None
    quantization: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What turns a final state into logits.

    Attributes:
        weight: [V, H] in the dtype on the disk.
        norm: the final norm, None where the final state is already normed.
    """

    weight: torch.Tensor
    norm: FinalNorm | None


def read_model(path: Path) -> ModelInfo:
    """Read a Hugging Face model folder.

    Raises:
        UserError: no such folder, no safetensors weights, or a config that lacks a field.
    """
    path = Path(path)
    config = _config(path)
    text = _text_config(config)
    try:
        return ModelInfo(
            name=_name(path),
            digest=digest(path),
            architecture=config["architectures"][0],
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            dtype=text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"),
            quantization=_quantization(config),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{path / 'config.json'}: expected a language model's configuration, missing {error}") from error


def capture_spec(model: ModelInfo, *, name: str | None, capture: Mapping[str, Any]) -> CaptureSpec:
    """The capture that a configuration's `capture` section asks of a model.

    Args:
        name: the name for people; None for the folder's.
        capture: residual_layers ("eagle3" or a list), final_norm, stored_dtype, compute_dtype.

    Raises:
        UserError: layers that the model does not have.
    """
    return CaptureSpec(
        model=name or model.name,
        model_digest=model.digest,
        compute_dtype=capture["compute_dtype"],
        quantization=model.quantization,
        stored_dtype=capture["stored_dtype"],
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        residual_layers=chosen_layers(capture["residual_layers"], num_layers=model.num_layers),
        final_norm=capture["final_norm"],
    )


def digest(path: Path) -> str:
    """What a model is by content: its hub commit where it lies in a hub cache, else a hash over the folder's files.

    The hash covers config and tokenizer, and of each weight file the tensor headers, the size, 64 blocks of 4 KiB spread over it and one
    of each of its tensors (of 320, spread over it, where it has more). A change of a few numbers of a tensor may so be missed. Paths,
    dates and who wrote the config do not enter.

    Raises:
        UserError: no such folder or no safetensors weights.
    """
    path = Path(path)
    files = _weight_files(path)
    for folder in (path.absolute(), path.resolve()):
        if folder.parent.name == "snapshots" and _SNAPSHOT.fullmatch(folder.name):
            return f"commit-{folder.name}"
    total = hashlib.sha256(b"draftstates.model.v2\0" + _canonical(path / "config.json"))
    for name in _TOKENIZER_FILES:
        file = path / name
        if file.exists():
            total.update(f"\0{name}\0".encode() + (_canonical(file) if name.endswith("config.json") else file.read_bytes()))
    for file in files:
        total.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        for block in _sampled_blocks(file):
            total.update(block)
    return f"content-{total.hexdigest()[:40]}"


def read_head(path: Path, *, final_norm: str) -> Head:
    """Read what maps a captured final state to logits: `lm_head` (or the embeddings it is tied to) and, for `pre_norm`, the norm.

    Raises:
        UserError: the head is quantised, scaled, or not found; or the norm is of a kind not known.
    """
    import torch

    from draftstates.final_norm import FinalNorm

    path = Path(path)
    config = _config(path)
    text = _text_config(config)
    for scale in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if text.get(scale) not in (None, 1, 1.0):
            raise UserError(f"{path}: alignment cannot be checked: the model scales its logits ({scale}: {text[scale]})")
    weight = _find_tensor(path, _HEAD_NAMES)
    if weight is None and text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)):
        weight = _find_tensor(path, _EMBEDDING_NAMES)
    if weight is None:
        raise UserError(f"{path}: no safetensors file holds lm_head.weight, and the embeddings are not tied to it")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.ndim != 2:
        raise UserError(f"{path}: alignment cannot be checked: lm_head is quantised ({weight.dtype}, shape {tuple(weight.shape)})")
    return Head(weight=weight[: int(text["vocab_size"])], norm=FinalNorm.from_model(path) if final_norm == "pre_norm" else None)


def _name(path: Path) -> str:
    folder = path.absolute()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rsplit("--", 1)[-1]
    return folder.resolve().name


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a model folder with config.json, found {type(error).__name__}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path / 'config.json'}: expected a mapping, found {type(config).__name__}")
    return config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part: multimodal wrappers hold it inside."""
    return config.get("text_config", config)


def _quantization(config: dict[str, Any]) -> str | None:
    found = config.get("quantization_config") or _text_config(config).get("quantization_config")
    return None if not found else str(found.get("quant_method", "unknown"))


def _canonical(file: Path) -> bytes:
    """A JSON file's content without what says where it came from."""

    def content(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if key not in _NOT_CONTENT}

    try:
        return json.dumps(json.loads(file.read_bytes(), object_hook=content), sort_keys=True).encode()
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: expected JSON of a model, found {type(error).__name__}: {error}") from error


def _weight_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
        raise UserError(f"{path}: expected weights as *.safetensors, found {', '.join(others) or 'none'}")
    return files


def _sampled_blocks(file: Path) -> Iterator[bytes]:
    """The header and the sampled blocks of one weight file; each block at a place of its own, drawn from the header's hash.

    Raises:
        UserError: its header is not that of a safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as handle:
        prefix = handle.read(8)
        header = handle.read(min(int.from_bytes(prefix, "little"), size))
        yield prefix + header
        start = 8 + len(header)
        stride = (size - start) / _BLOCKS
        spans = [(stride * index, stride * (index + 1)) for index in range(_BLOCKS)] + _tensor_spans(file, header)
        draws = hashlib.shake_128(header).digest(4 * len(spans))
        for index, (begin, end) in enumerate(spans):
            draw = int.from_bytes(draws[4 * index : 4 * index + 4], "little") / 2**32
            handle.seek(start + int(begin + draw * max(0, end - begin - _BLOCK_BYTES)))
            yield handle.read(_BLOCK_BYTES)


def _tensor_spans(file: Path, header: bytes) -> list[tuple[int, int]]:
    """First and last byte, after the header, of each tensor, or of `_TENSORS` of them at equal steps."""
    try:
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in json.loads(header).items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not a readable safetensors file: {type(error).__name__}: {error}") from error
    return spans if len(spans) <= _TENSORS else [spans[len(spans) * index // _TENSORS] for index in range(_TENSORS)]


def _find_tensor(path: Path, names: re.Pattern[str]) -> torch.Tensor | None:
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a safetensors file, not a mapping)
                    if names.fullmatch(name):
                        return tensors.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{file}: not a readable safetensors file: {error}") from error
    return None
