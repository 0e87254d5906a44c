"""Digests of a model and its tokenizer by content, and the capture that a configuration asks for.

The model's digest enters the capture key. The tokenizer's digest decides when rows are tokenised a
second time.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.files import files_digest
from draftstates.model.folder import ModelFolder, unreadable_weights
from draftstates.spec import CaptureSpec, chosen_layers

# The tokenizer's files that enter the model's digest, out of `folder.TOKENIZER_FILES`.
_TOKENIZER_IN_DIGEST = frozenset(
    (
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
)
# Keys that name a file's origin and the program that wrote it.
_NOT_CONTENT = (
    "_name_or_path",
    "name_or_path",
    "_model_name_or_path",
    "transformers_version",
)
# Blocks sampled of each weight file: they take milliseconds, a large model whole takes minutes.
_BLOCKS, _BLOCK_BYTES = 64, 4096
# More than a file of most models has; mixtures of experts have more.
_TENSORS = 320


def model_digest(model: ModelFolder) -> str:
    """Return what identifies a model by content: a hub commit or a hash over its files.

    In a hub cache it is the hub commit. Otherwise it is a hash that covers `config.json` and
    tokenizer. Of each weight file the hash covers the tensor headers, the size, 64 blocks of 4 KiB
    spread over the file and one block of each tensor (of 320 tensors, spread over the file, if it
    has more). It may miss a change of a few numbers of a tensor. Paths, dates and the program that
    wrote the config do not enter.

    Raises:
        UserError: the folder holds no model or no safetensors weights.
    """
    files = model.weight_files
    if model.hub_commit:
        return f"commit-{model.hub_commit}"
    total = hashlib.sha256(b"draftstates.model.v2\0" + _canonical(model.config_path))
    for file in model.tokenizer_files:
        if file.name in _TOKENIZER_IN_DIGEST and file.parent == model.path:
            content = _canonical(file) if file.name.endswith("config.json") else file.read_bytes()
            total.update(f"\0{file.name}\0".encode() + content)
    for file in files:
        total.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        for block in _sampled_blocks(file):
            total.update(block)
    return f"content-{total.hexdigest()[:40]}"


def tokenizer_digest(model: ModelFolder) -> str:
    """Return a hash of the files that decide a text's tokens and the end tokens of a turn."""
    return files_digest(model.tokenizer_files, root=model.path)[:16]


def check_content(model: ModelFolder, *, expected: str) -> None:
    """Refuse a folder that holds another model than the captured one.

    Args:
        expected: the digest that the capture was planned for.

    Raises:
        UserError: the digests differ.
    """
    found = model_digest(model)
    if found != expected:
        raise UserError(
            f"{model.path}: not the captured model: expected content {expected}, found {found}:"
            " the model has changed since the plan; plan again, or name the captured model's folder"
        )


def capture_spec(
    model: ModelFolder, *, name: str | None, capture: Mapping[str, Any]
) -> CaptureSpec:
    """Return the capture that a configuration's `capture` section asks of a model.

    Args:
        name: the name for people; None for the folder's.
        capture: residual_layers ("eagle3" or a list), final_norm, stored_dtype, compute_dtype.

    Raises:
        UserError: the model does not have the layers.
    """
    return CaptureSpec(
        model=name or model.name,
        model_digest=model_digest(model),
        compute_dtype=capture["compute_dtype"],
        quantization=model.quantization,
        stored_dtype=capture["stored_dtype"],
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        residual_layers=chosen_layers(capture["residual_layers"], num_layers=model.num_layers),
        final_norm=capture["final_norm"],
    )


def _canonical(file: Path) -> bytes:
    """Return a JSON file's content without the keys that say where it comes from."""

    def content(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if key not in _NOT_CONTENT}

    try:
        return json.dumps(
            json.loads(file.read_bytes(), object_hook=content), sort_keys=True
        ).encode()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: expected JSON of a model, found {type(error).__name__}: {error}: download it"
            " again"
        ) from error


def _sampled_blocks(file: Path) -> Iterator[bytes]:
    """Yield the header and the sampled blocks of one weight file.

    The header's hash draws each block's place.

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
        spans = [
            (stride * index, stride * (index + 1)) for index in range(_BLOCKS)
        ] + _tensor_spans(file, header)
        draws = hashlib.shake_128(header).digest(4 * len(spans))
        for index, (begin, end) in enumerate(spans):
            draw = int.from_bytes(draws[4 * index : 4 * index + 4], "little") / 2**32
            handle.seek(start + int(begin + draw * max(0, end - begin - _BLOCK_BYTES)))
            yield handle.read(_BLOCK_BYTES)


def _tensor_spans(file: Path, header: bytes) -> list[tuple[int, int]]:
    """Return first and last byte of each tensor, counted after the header.

    A file with more than `_TENSORS` tensors gives `_TENSORS` of them at equal steps.
    """
    try:
        spans = sorted(
            tuple(entry["data_offsets"])
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable_weights(file, error) from error
    return (
        spans
        if len(spans) <= _TENSORS
        else [spans[len(spans) * index // _TENSORS] for index in range(_TENSORS)]
    )
