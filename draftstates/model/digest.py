"""Digests of a model and its tokenizer by content, and the capture that a configuration asks for.

The model's digest enters the capture key. The tokenizer's digest decides when rows are tokenised a
second time; it does not enter the key.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftstates.config import Configuration
from draftstates.errors import UserError
from draftstates.files import files_digest
from draftstates.model.folder import ModelFolder, read_model_json
from draftstates.model.layers import chosen_layers
from draftstates.model.weight_files import weight_digests
from draftstates.spec import CaptureSpec

# Files beside the weights that decide what an engine computes, as patterns of `Path.glob`. Neither
# the tokenizer nor the chat template is among them: a sample's ids are its own, so that a change of
# these files tokenises again and captures what has other ids.
_CONTENT = (
    "config.json",
    "generation_config.json",
    "params.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "*.safetensors.index.json",
    "**/*.py",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Keys that name a file's origin and the program that wrote it.
_NOT_CONTENT = (
    "_name_or_path",
    "name_or_path",
    "_model_name_or_path",
    "transformers_version",
)


def model_digest(model: ModelFolder) -> str:
    """Return a hash that identifies a model by content.

    It covers `config.json`, `generation_config.json`, files that describe a quantisation, the index
    of the weights and Python code. It covers the tensor headers of each weight file, its size, and
    blocks of 4 KiB: three of each matrix and 64 spread over the file (see `weight_files`). It may
    miss a change of a few numbers of a matrix, except in a hub cache: the files of a cache are
    links to blobs whose names are hashes of their whole content, and the hash covers these names.
    Paths, dates and the program that wrote the config do not enter.

    Raises:
        UserError: the folder holds no model or no safetensors weights.
    """
    weights = model.weight_files
    described = _described_files(model)
    names = [_blob(file) for file in weights]
    cached = all(names)
    total = hashlib.sha256(b"draftstates.model.v4\0")
    for file in described:
        content = _canonical(file) if file.suffix == ".json" else file.read_bytes()
        total.update(f"\0{file.relative_to(model.path)}\0{len(content)}\0".encode() + content)
    for file, blob, sampled in zip(weights, names, weight_digests(weights), strict=True):
        size, whole = file.stat().st_size, blob if cached else ""
        total.update(f"\0{file.name}\0{size}\0{whole}\0{sampled}\0".encode())
    return f"{'hub' if cached else 'content'}-{total.hexdigest()[:40]}"


def _described_files(model: ModelFolder) -> list[Path]:
    """Return the files beside the weights that decide what an engine computes, by path."""
    found = {file for pattern in _CONTENT for file in model.path.glob(pattern) if file.is_file()}
    # `config.json` is named where it is missing, too: its reader says what to do
    return sorted(
        file
        for file in {*found, model.config_path}
        if not any(part.startswith(".") for part in file.relative_to(model.path).parts)
    )


def _blob(file: Path) -> str | None:
    """Return the blob that a file of a Hugging Face cache is a link to.

    Such a link leads from `<repository>/snapshots/<commit>/` into `<repository>/blobs/`, to a file
    that the hub names by the SHA-256 of its content.
    """
    target = file.resolve()
    folder = file.parent.resolve()
    in_cache = (
        file.is_symlink()
        and folder.parent.name == "snapshots"
        and target.parent == folder.parent.parent / "blobs"
        and _SHA256.fullmatch(target.name)
    )
    return target.name if in_cache else None


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


def configured_capture(config: Configuration, model: ModelFolder | None = None) -> CaptureSpec:
    """Return the capture that a configuration asks for.

    Args:
        model: where the configured model lies; None for `model.path`.

    Raises:
        UserError: the model does not have the layers.
    """
    return capture_spec(
        model or ModelFolder(config.model.path),
        name=config.model.name,
        capture=dict(config.capture),
        engine_args=config.model.engine_args,
        engine_env=config.model.engine_env,
    )


def capture_spec(
    model: ModelFolder,
    *,
    name: str | None,
    capture: Mapping[str, Any],
    engine_args: Sequence[str] = (),
    engine_env: Mapping[str, str] = MappingProxyType({}),
) -> CaptureSpec:
    """Return the capture that a configuration's `capture` section asks of a model.

    Args:
        name: the name for people; None for the folder's.
        capture: residual_layers (see `chosen_layers`), final_norm, stored_dtype, compute_dtype;
            final_state, true where it is missing.
        engine_args: the engine's flags that change numbers, in one spelling and order.
        engine_env: the engine's variables that change numbers.

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
        final_state=capture.get("final_state", True),
        engine_args=tuple(engine_args),
        engine_env=tuple(f"{name}={value}" for name, value in sorted(engine_env.items())),
    )


def _canonical(file: Path) -> bytes:
    """Return a JSON file's content without the keys that say where it comes from."""

    def content(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if key not in _NOT_CONTENT}

    return json.dumps(read_model_json(file, object_hook=content), sort_keys=True).encode()
