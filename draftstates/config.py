"""The configuration: read, checked against `schemas/config.schema.yaml`, defaults filled in.

A configuration is a plain dict with every key of the schema present and sizes as numbers of bytes.
"""

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftstates.config_problems import not_plain, problems
from draftstates.errors import UserError
from draftstates.layers import chosen_layers

SCHEMA = Path(__file__).parent.parent / "schemas" / "config.schema.yaml"
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]+)?")  # Python refuses to read thousands of digits; more than 18 stay text, which no number is


def load(path: Path) -> dict[str, Any]:
    """Read a configuration file and `resolve` it.

    Raises:
        UserError: no such file, no YAML mapping, or what `resolve` refuses.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: the configuration cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, a date that there is none of, thousands of digits
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a mapping of configuration keys, found {type(raw).__name__}")
    return resolve(raw, origin=str(path))


def resolve(raw: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    """Check a configuration and fill in what it leaves out; a resolved one comes back unchanged.

    Args:
        origin: where it came from, for messages.

    Raises:
        UserError: names every key at fault with its path, such as `data.sources[0].nmae`.
    """
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    if found := sorted(not_plain(raw)):
        raise UserError(f"{origin}: " + "; ".join(found))
    config = json.loads(json.dumps(raw, allow_nan=False))  # plain dicts and lists, whatever a YAML reader or Snakemake made of them
    config = _read_numbers(config, schema, schema)
    if found := sorted(problems(config, schema)):
        raise UserError(f"{origin}: " + "; ".join(found))
    _fill(config, schema, schema)
    _check_together(config, origin)
    _name_model(config, schema, origin)
    return config


def save_resolved(config: Mapping[str, Any]) -> None:
    """Write a resolved configuration to its `resolved_path`, once, for the commands that the workflow starts."""
    path = resolved_path(config)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(yaml.safe_dump(dict(config), allow_unicode=True, sort_keys=False), encoding="utf-8")
    partial.rename(path)


def check_results(config: Mapping[str, Any]) -> None:
    """See that the results can be written, before Snakemake stumbles over it.

    Raises:
        UserError: what stands in the way.
    """
    folder = Path(config["results"]).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"results: {config['results']} cannot be written: {folder} is no folder that this user may write to")


def check_model(config: Mapping[str, Any]) -> None:
    """See that the model is there, or is made by a rule.

    Raises:
        UserError: it is not, and what to do.
    """
    path = Path(config["model"]["path"])
    if config["model"]["prepare"] == "none" and not (path / "config.json").exists():
        raise UserError(
            f"model.path: {path} has no config.json: put the model there, with tokenizer and weights, "
            f"such as by `hf download <name> --local-dir {path}`"
        )


def resolved_path(config: Mapping[str, Any]) -> Path:
    """Where a resolved configuration lies: its name is a hash of its content, so it never changes under a running job."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return Path(config["results"]) / "config" / f"{digest[:16]}.yaml"


def state_folder(config: Mapping[str, Any]) -> Path:
    """Where the clients and the supervisor of a server agree."""
    return Path(config["server"]["state"] or Path(config["results"]) / ".server").resolve()


def _read_numbers(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The value with text made numbers where the schema wants them: sizes, and what Snakemake passes as text (--config, profiles)."""
    schema = _followed(schema, root)
    if _is_size(schema) and isinstance(value, str) and re.fullmatch(root["$defs"]["bytes"]["anyOf"][1]["pattern"], value):
        return _number_of_bytes(value)
    for choice in schema.get("anyOf", []):
        value = _read_numbers(value, choice, root)
    kinds = schema.get("type", [])
    numeric = not {"integer", "number"}.isdisjoint([kinds] if isinstance(kinds, str) else kinds)
    if numeric and isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value) if "." in value else int(value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return {name: _read_numbers(part, known.get(name, {}), root) for name, part in value.items()}
    if isinstance(value, list):
        return [_read_numbers(part, schema.get("items", {}), root) for part in value]
    return value


def _followed(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema with what its `$ref` names."""
    return {**root["$defs"][schema["$ref"].rpartition("/")[2]], **schema} if "$ref" in schema else schema


def _fill(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Put the schema's defaults into mappings, in place, sizes as numbers."""
    for name, part in schema.get("properties", {}).items():
        part = _followed(part, root)
        if name not in value and "default" in part:
            value[name] = copy.deepcopy(part["default"])
        if name not in value:
            continue
        if _is_size(part) and isinstance(value[name], str):
            value[name] = _number_of_bytes(value[name])
        if isinstance(value[name], dict):
            _fill(value[name], part, root)
        elif isinstance(value[name], list) and "properties" in part.get("items", {}):
            for item in value[name]:
                _fill(item, part["items"], root)


def _is_size(schema: dict[str, Any]) -> bool:
    return any(part.get("$ref") == "#/$defs/bytes" for part in [schema, *schema.get("anyOf", [])])


def _number_of_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([0-9.]+) ?([A-Za-z]+)", text).groups()
    return int(float(number) * _UNITS[unit])


def _check_together(config: dict[str, Any], origin: str) -> None:
    """What no schema of single keys can say."""
    names = [source["name"] for source in config["data"]["sources"]]
    for name in sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{origin}: data.sources: expected a different name for each source, found {name} {names.count(name)} times")
    shards = config["shards"]
    if shards["max_bytes"] < 2 * shards["min_bytes"]:
        raise UserError(
            f"{origin}: shards.max_bytes: expected at least twice shards.min_bytes ({shards['min_bytes']:,}), found {shards['max_bytes']:,}"
        )
    layers = config["capture"]["residual_layers"]
    if isinstance(layers, list) and layers != sorted(layers):
        raise UserError(f"{origin}: capture.residual_layers: expected ascending numbers, found {layers}")
    _check_layers(config, origin)
    server = config["server"]
    if server["launcher"] == "external" and not server["url"]:
        raise UserError(f"{origin}: server.url: missing: the launcher external needs the address of a server that runs already")
    _check_ranks(server, origin)


_OF_DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size", "--attn-dp-size", "--enable-dp-attention")
_OF_THE_WORKFLOW = ("--config", "--host", "--port", "--api-key")
_CHANGES_NUMBERS = ("--quantization", "--quantization-param-path", "--torchao-config", "--kv-cache-dtype", "--load-format")
_NOT_FOR_ARGS = {
    **dict.fromkeys(("--model-path", "--model"), "use model.path"),
    "--dtype": "use capture.compute_dtype",
    **dict.fromkeys(_OF_THE_WORKFLOW, "the workflow says it itself"),
    **dict.fromkeys(_CHANGES_NUMBERS, "it changes the captured numbers, and the capture key would not tell"),
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "use server.tensor_parallel"),
    **dict.fromkeys(_OF_DATA_PARALLEL, "use server.replicas, or server.data_parallel_attention"),
    **dict.fromkeys(("--pp", "--pp-size", "--pipeline-parallel-size"), "a pipeline parallel server cannot be captured"),
    "--nnodes": "a server is on one node; use server.replicas",
}


def _check_ranks(server: Mapping[str, Any], origin: str) -> None:
    if server["tensor_parallel"] % server["data_parallel_attention"]:
        raise UserError(
            f"{origin}: server.data_parallel_attention: expected a divisor of tensor_parallel, {server['tensor_parallel']}, "
            f"found {server['data_parallel_attention']}"
        )
    for argument in server["args"]:
        given = argument.split("=")[0].replace("_", "-")
        meant = [given] if given in _NOT_FOR_ARGS else [flag for flag in _NOT_FOR_ARGS if flag.startswith(given)]
        if meant and given.startswith("--"):  # SGLang takes a flag that is cut short too
            raise UserError(f"{origin}: server.args: {given} is not for here: {_NOT_FOR_ARGS[meant[0]]}")


def _check_layers(config: dict[str, Any], origin: str) -> None:
    """Find layers that the model does not have, where it is there already: else the plan does, after all tokenising."""
    try:
        model = json.loads((Path(config["model"]["path"]) / "config.json").read_bytes())
        num_layers = model.get("text_config", model)["num_hidden_layers"]
        chosen_layers(config["capture"]["residual_layers"], num_layers=num_layers)
    except UserError as error:
        raise UserError(f"{origin}: capture.{error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # no model yet, or none that can be read: the plan names it


def _name_model(config: dict[str, Any], schema: dict[str, Any], origin: str) -> None:
    """The folder's name where the configuration gives none: it names the results folder too, so not every name will do."""
    if config["model"]["name"] is None:
        name = Path(config["model"]["path"]).resolve().name
        if not re.fullmatch(schema["properties"]["model"]["properties"]["name"]["pattern"], name):
            raise UserError(f"{origin}: model.name: missing: the folder's name, {name!r}, cannot name a results folder")
        config["model"]["name"] = name
