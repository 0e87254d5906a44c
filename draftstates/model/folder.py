"""A model's folder in Hugging Face's layout: the one reader of its files.

Every run of Snakemake asks for the model's content, so this module imports no torch. A value is
read when a caller asks for it: a folder that holds a tokenizer alone can give its end tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from draftstates.config import Configuration
from draftstates.engine import flags
from draftstates.errors import UserError
from draftstates.hub import cache_folder, is_hub_id, model_name
from draftstates.model.family import (
    NUMBERS,
    PARTS,
    check_capturable,
    check_reusable,
    final_norm,
    text_config,
    with_usual_names,
)
from draftstates.model.layers import chosen_layers
from draftstates.model.lengths import switch_length

if TYPE_CHECKING:
    import torch

# Files that decide which tokens a text becomes and which of them end a turn, as patterns of
# `Path.glob`. `config.json` and `generation_config.json` name end tokens and the tokenizer's class;
# `*.py` is the code of a tokenizer that transformers does not have.
TOKENIZER_FILES = (
    "*.jinja",
    "*.model",
    "*.py",
    "*.tiktoken",
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
# Keys that name the context length, in the order in which SGLang reads them.
_CONTEXT_LENGTHS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
# what the keys hold that are read here and elsewhere, in any part of `config.json`
_NUMBER, _TEXT, _MAPPING, _LIST = "a finite number", "text", "a mapping", "a list of text"
_KINDS = {
    **dict.fromkeys(("factor", *_CONTEXT_LENGTHS, *NUMBERS), _NUMBER),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype", "quant_method"), _TEXT),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), _MAPPING),
    **dict.fromkeys(PARTS, _MAPPING),
    "architectures": _LIST,
}
_LARGEST = 1e15
_INDEX = "model.safetensors.index.json"
# Both hold all weights, the first under Mistral's names.
_TWICE = ("consolidated.safetensors", "model.safetensors")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model on the disk.

    Every property raises UserError where its file is missing or holds something else: the message
    names the file, what was expected, what was found and what to do.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def config_path(self) -> Path:
        """Return where the model's configuration lies."""
        return self.path / "config.json"

    def exists(self) -> bool:
        """Return whether the folder holds a model; the rule that makes it may not have run yet."""
        return self.config_path.exists()

    @property
    def name(self) -> str:
        """Return a name for people: the folder's, or the model's in a Hugging Face cache."""
        return model_name(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return `config.json`."""
        if not self.exists():
            raise UserError(
                f"{self.path.absolute()}: expected a model's folder, found no config.json in it:"
                f" {_remedy(self.path)}"
            )
        return _read_mapping(self.config_path)

    @cached_property
    def text(self) -> dict[str, Any]:
        """Return the language model's part of `config.json`."""
        return with_usual_names(text_config(self.config))

    @property
    def model_type(self) -> str | None:
        """Return the family of the language model, such as `llama`."""
        return self.text.get("model_type")

    @property
    def num_layers(self) -> int:
        """Return N, the number of decoder layers."""
        return self._count("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        """Return H, the values of one state."""
        return self._count("hidden_size")

    @property
    def vocab_size(self) -> int:
        """Return V, the number of token ids; a head may have more rows, as padding."""
        return self._count("vocab_size")

    @property
    def context_length(self) -> int | None:
        """Return the most tokens that a request may have, as SGLang derives it, or None."""
        scaling = self.text.get("rope_scaling") or self.text.get("rope_parameters") or {}
        factor = scaling.get("factor") or 1
        if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
            factor = 1
        longest = next((self.text[key] for key in _CONTEXT_LENGTHS if self.text.get(key)), None)
        return int(factor * longest) if longest else None

    @property
    def dtype(self) -> str | None:
        """Return the number format of the weights; older files call it `torch_dtype`."""
        places = (
            (config, key) for config in (self.text, self.config) for key in ("dtype", "torch_dtype")
        )
        return next((config[key] for config, key in places if config.get(key)), None)

    @property
    def quantization(self) -> str | None:
        """Return the method by which the weights are quantised; None for plain weights."""
        found = self.config.get("quantization_config") or self.text.get("quantization_config")
        if not found:
            # NVIDIA's ModelOpt may describe the quantisation in a file of its own
            return "modelopt" if (self.path / "hf_quant_config.json").exists() else None
        return str(found.get("quant_method", "unknown"))

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the end tokens of `generation_config.json` and `config.json`, if they exist.

        A multimodal wrapper may name them for its language model alone.
        """
        found: list[object] = []
        for file in (self.path / "generation_config.json", self.config_path):
            if file.exists():
                content = _read_mapping(file)
                for part in (content, text_config(content)):
                    named = part.get("eos_token_id")
                    found += named if isinstance(named, list) else [named]
        return frozenset(token for token in found if isinstance(token, int))

    @property
    def code(self) -> list[str]:
        """Return the Python code that transformers and SGLang run if they may: the folder's files,
        and what `auto_map` of `config.json` names."""
        files = sorted(file.relative_to(self.path).as_posix() for file in self.path.rglob("*.py"))
        named = self.config.get("auto_map")
        return files + (sorted(map(str, named.values())) if isinstance(named, dict) else [])

    @property
    def tokenizer_files(self) -> list[Path]:
        """Return the files that decide tokens and end tokens, by path."""
        return sorted(
            {
                file
                for pattern in TOKENIZER_FILES
                for file in self.path.glob(pattern)
                if file.is_file()
            }
        )

    @property
    def weight_files(self) -> list[Path]:
        """Return the safetensors files that engines load, by name.

        They are those that the index names, if there is one. Mistral's folders also hold all
        weights in one more file, under names of its own.
        """
        files = sorted(self.path.glob("*.safetensors"))
        if named := self._indexed_files:
            if missing := named - {file.name for file in files}:
                raise UserError(
                    f"{self.path}: expected the {len(named)} files that {_INDEX} names, found no"
                    f" {', '.join(sorted(missing)[:3])}: download the model again"
                )
            return [file for file in files if file.name in named]
        if [file.name for file in files] == list(_TWICE):
            return files[1:]
        if not files:
            others = sorted(
                file.name for pattern in _OTHER_WEIGHTS for file in self.path.glob(pattern)
            )
            raise UserError(
                f"{self.path}: expected weights as *.safetensors, found"
                f" {', '.join(others) or 'no weights'}: put the model's safetensors files there"
            )
        return files

    @property
    def _indexed_files(self) -> set[str]:
        """Return the names of the weight files that the index names; none without an index."""
        index = self.path / _INDEX
        if not index.exists():
            return set()
        found = _read_mapping(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise _wrong(index, "weight_map", "a mapping of tensors to files", found)
        return set(found.values())

    def tensor(self, names: re.Pattern[str]) -> torch.Tensor | None:
        """Return the first tensor whose whole name matches, or None.

        Raises:
            UserError: the folder holds no weights, or a file cannot be read.
        """
        for file in self.weight_files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (a safetensors file, not a mapping)
                        if names.fullmatch(name):
                            return tensors.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise unreadable_weights(file, error) from error
        return None

    def _count(self, key: str) -> int:
        found = self.text.get(key)
        if type(found) is not int or found < 1:
            raise _wrong(self.config_path, key, "a whole number above 0", found)
        return found


def _wrong(file: Path, key: str, expected: str, found: object) -> UserError:
    return UserError(
        f"{file}: expected {key}, {expected}, found"
        f" {'no such key' if found is None else repr(found)}: use the file of a language model"
        " as its authors published it"
    )


def _is(value: object, expected: str) -> bool:
    if expected == _NUMBER:
        return type(value) in (int, float) and abs(value) < _LARGEST
    if expected == _LIST:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, str if expected == _TEXT else dict)


def unreadable_weights(file: Path, error: Exception) -> UserError:
    """Return the error for a file of weights that is cut short or of another kind."""
    return UserError(
        f"{file}: not a readable safetensors file: {type(error).__name__}: {error}: download it"
        " again"
    )


def _remedy(path: Path) -> str:
    """Return what to do about a folder that holds no model."""
    # the presets name folders of `models`, which is no organisation
    if is_hub_id(str(path)) and not path.parent.is_dir() and path.parent.name != "models":
        local = f"models/{path.name}"
        return (
            f"if {path} is a model of the hub, its cache {cache_folder()} does not hold it; run: hf"
            f" download {path} --local-dir {local}, and set model.path: {local}"
        )
    return (
        "put the model there, with tokenizer and weights, such as by: hf download"
        f" <organisation>/{path.name} --local-dir {path}"
    )


def read_model_json(file: Path, **options: Any) -> Any:
    """Return the content of a model's JSON file.

    Args:
        file: the file.
        options: arguments of `json.loads`.

    Raises:
        UserError: the file is missing, or it holds no JSON.
    """
    try:
        return json.loads(file.read_bytes(), **options)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: expected JSON of a model, found {type(error).__name__}: {error}: download it"
            " again"
        ) from error


def _read_mapping(file: Path) -> dict[str, Any]:
    found = read_model_json(file)
    if not isinstance(found, dict):
        raise UserError(
            f"{file}: expected a mapping, found {type(found).__name__}: download it again"
        )
    _check_kinds(file, found)
    return found


def _check_kinds(file: Path, part: dict[str, Any]) -> None:
    """Refuse a value of another kind than its key has, in a part of a model's configuration."""
    for key, value in part.items():
        expected = _KINDS.get(key)
        if expected is None or value is None:
            continue
        if not _is(value, expected):
            raise _wrong(file, key, expected, value)
        if expected == _MAPPING:
            _check_kinds(file, value)


def check_model(config: Configuration) -> None:
    """Refuse a model that is missing and that no rule makes, or that cannot be captured as asked.

    Its layers may be too few, its residual stream out of reach, its final norm unknown, or the
    samples longer than its context.

    Raises:
        UserError: names the key of the configuration, what was found and what to do.
    """
    model = ModelFolder(config.model.path)
    if config.model.prepare != "none" and not model.exists():
        return
    try:
        num_layers = model.num_layers
        check_capturable(model.config, origin=model.config_path)
        if config.capture.reuse_prefixes:
            check_reusable(model.config, origin=model.config_path)
        if config.model.trust_remote_code and (other := [x for x in model.code if "--" in x]):
            raise UserError(
                f"{model.config_path}: auto_map names code of another repository ({other[0]}),"
                " which the capture key does not cover: put its Python files into the folder, and"
                " name them in auto_map without what stands before --"
            )
        if config.capture.final_norm == "pre_norm":
            final_norm(model.text, origin=model.config_path)
    except UserError as error:
        raise UserError(f"model.path: {error}") from None
    try:
        chosen_layers(config.capture.residual_layers, num_layers=num_layers)
    except UserError as error:
        raise UserError(f"capture.{error}") from None
    _check_context(config, model)


def _check_context(config: Configuration, model: ModelFolder) -> None:
    """Refuse samples that the server would refuse: it generates one token behind each."""
    lengths = {str(model.config_path): model.context_length}
    if (named := flags.context_length(config.server.args)) is not None:
        lengths[f"{flags.CONTEXT_FLAG} in server.args"] = named
    for origin, longest in lengths.items():
        if longest and config.data.max_tokens >= longest:
            raise UserError(
                f"data.max_tokens: expected less than {longest:,}, the context length by {origin},"
                f" found {config.data.max_tokens:,}: longer samples cannot be captured"
            )
    switch = switch_length(model.text)
    if switch and config.data.max_tokens > switch:
        raise UserError(
            f"data.max_tokens: expected at most {switch:,}, found {config.data.max_tokens:,}:"
            f" beyond that {model.config_path} rotates all positions otherwise (longrope), which"
            " SGLang does for a whole batch, so that a sample's rows would depend on other samples"
        )
