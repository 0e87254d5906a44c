"""The configuration: what is wrong is named with its path, defaults are filled in, presets and the
default hold.
"""

import datetime
import json
import typing
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from draftstates import config
from draftstates.config_types import Section
from draftstates.errors import UserError

REPOSITORY = Path(__file__).parents[2]
TRAINERS = typing.get_args(config.TrainerName)
FILES = [REPOSITORY / "config.yaml", *sorted((REPOSITORY / "presets").glob("*.yaml"))]


def minimal() -> dict:
    return {
        "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8},
        "model": {"path": "models/m"},
        "capture": {},
    }


def edited(path: str, value: object) -> dict:
    """Return a minimal configuration with one key, named by its path, set to `value`."""
    raw = minimal()
    at, keys = raw, path.split(".")
    for key in keys[:-1]:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    at[keys[-1]] = value
    return raw


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_default_and_every_preset_hold(path: Path) -> None:
    assert config.load(path).model.name


def test_there_is_a_preset_for_each_promised_model() -> None:
    assert {path.stem for path in FILES} >= {
        "smollm2",
        "qwen3-8b",
        "llama-3.1-8b",
        "deepseek-v3",
        "kimi-k2.5",
    }


def test_kimi_is_captured_as_it_was_first_run() -> None:
    kimi = config.load(REPOSITORY / "presets" / "kimi-k2.5.yaml")
    assert kimi.capture.residual_layers == [3, 31, 59]
    assert kimi.server.tensor_parallel == 8


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("data.sources.0.nmae", "x", "data.sources[0].nmae: unknown key (did you mean name?)"),
        ("foo", 1, "foo: unknown key"),
        ("server.replica", 2, "server.replica: unknown key (did you mean replicas?)"),
        (
            "data.max_tokens",
            "many",
            'data.max_tokens: expected integer (longest sample in tokens), found "many"',
        ),
        ("data.sources", [], "data.sources: expected at least 1 entry"),
        ("data.sources.0.name", "a/b", "data.sources[0].name: expected text like"),
        (
            "data.over_long",
            "drop",
            (
                "data.over_long: expected one of skip, cut (a longer sample is skipped, or cut at"
                ' the end of a turn), found "drop"'
            ),
        ),
        ("data.roles", {"kimi": "robot"}, "data.roles.kimi: expected one of system, developer"),
        ("data.may_drop", ["text"], "data.may_drop[0]: expected one of reasoning, tools"),
        ("capture.residual_layers", "eagle", "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", [2, 2], "capture.residual_layers: expected eagle3"),
        (
            "capture.residual_layers",
            "dflash",
            "capture.residual_layers: expected eagle3, {dflash: layers of the drafter} or a list",
        ),
        ("capture.residual_layers", {"dflash": 0}, "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", {"eagle": 3}, "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", {}, "capture.residual_layers: expected eagle3"),
        (
            "capture",
            {"residual_layers": [], "final_state": False},
            "capture.final_state: expected true where residual_layers is empty, found false",
        ),
        (
            "capture.residual_layers",
            [4, 2],
            "capture.residual_layers: expected ascending numbers, found [4, 2]",
        ),
        (
            "max_bytes",
            "4 Gb",
            (
                "max_bytes: expected a number of bytes, at least 1, or text such as 512MiB or 4GB,"
                " or null (budget"
            ),
        ),
        ("capture.residual_layers", [1.0, 2], "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", ["1.0"], "capture.residual_layers: expected eagle3"),
        (
            "data.max_tokens",
            8.0,
            "data.max_tokens: expected integer (longest sample in tokens), found 8.0",
        ),
        (
            "data.sources.0.limit",
            1.5,
            (
                "data.sources[0].limit: expected integer or null (read only this many rows; null"
                " for all), found 1.5"
            ),
        ),
        (
            "data.sources.0.limit",
            "ten",
            (
                "data.sources[0].limit: expected integer or null (read only this many rows; null"
                ' for all), found "ten"'
            ),
        ),
        ("data.sources.0.name", "a\n", "data.sources[0].name: expected text like"),
        ("data.sources.0.name", " a", "data.sources[0].name: expected text like"),
        ("model.name", "m ", "model.name: expected text like"),
        ("model.name", "m\n", "model.name: expected text like"),
        (
            "model.path",
            "models/m ",
            "model.name: missing: the folder's name, 'm ', cannot name a results folder",
        ),
        ("server.url", "http://h:1\n", "server.url: expected text like"),
        (
            "server.data_parallel_attention",
            2,
            "server.data_parallel_attention: expected a divisor of tensor_parallel, 1, found 2",
        ),
        (
            "server.args",
            ["--dp-size=2"],
            "server.args: --dp-size is not accepted here: use server.replicas, or"
            " server.data_parallel",
        ),
        (
            "server.args",
            ["--tp", "2"],
            "server.args: --tp is not accepted here: use server.tensor_parallel",
        ),
        (
            "server.args",
            ["--pp-size", "2"],
            "server.args: --pp-size is not accepted here: a pipeline parallel server cannot be"
            " captured",
        ),
        (
            "server.args",
            ["--quantization", "fp8"],
            "server.args: --quantization is not accepted here: it changes the captured numbers",
        ),
        (
            "server.args",
            ["--kv-cache-dt=fp8_e4m3"],
            "server.args: --kv-cache-dt is not accepted here: it changes the captured numbers",
        ),
        (
            "server.args",
            ["--dtype", "float16"],
            "server.args: --dtype is not accepted here: use capture.compute_dtype",
        ),
        (
            "server.args",
            ["--model", "other"],
            "server.args: --model is not accepted here: use model.path",
        ),
        (
            "server.args",
            ["--config", "more.yaml"],
            "server.args: --config is not accepted here: the workflow sets it",
        ),
        (
            "server.args",
            ["--nnodes", "2"],
            "server.args: --nnodes is not accepted here: a server is on one node",
        ),
        (
            "server.args",
            ["--max-total-tokens 16384"],
            "server.args: expected each flag and each value as a string of its own",
        ),
        (
            "server.env",
            {"HF_HUB_OFFLINE": "0"},
            "server.env: HF_HUB_OFFLINE is not accepted here: the workflow sets it",
        ),
        (
            "server.env",
            {"NVIDIA_TF32_OVERRIDE": "1"},
            "server.env: NVIDIA_TF32_OVERRIDE is not accepted here: it can change the captured",
        ),
        (
            "model.engine_args",
            ["--max-total-tokens", "8"],
            "model.engine_args: --max-total-tokens is not accepted here: it changes no numbers",
        ),
        (
            "model.engine_args",
            ["--enable-lora"],
            "model.engine_args: --enable-lora is not accepted here: an adapter makes another model",
        ),
        (
            "model.engine_env",
            {"NCCL_DEBUG": "INFO"},
            "model.engine_env: NCCL_DEBUG is not accepted here: it changes no numbers",
        ),
        (
            "shards.min_shared_tokens",
            0,
            "shards.min_shared_tokens: expected at least 1 (shortest prefix that is shared), found",
        ),
        ("shards.min_bytes", "1TiB", "shards.max_bytes: expected at least twice shards.min_bytes"),
        (
            "shards.min_bytes",
            "9GiB",
            (
                "shards.max_bytes: expected at least twice shards.min_bytes (9,663,676,416), found"
                " 17,179,869,184"
            ),
        ),
        ("checks.recapture_fraction", 1.5, "checks.recapture_fraction: expected at most 1"),
        ("exclude", ["short"], "exclude[0]: expected text like"),
        (
            "server.launcher",
            "kubernetes",
            "server.launcher: expected one of local, slurm, external",
        ),
        ("server.launcher", "external", "server.url: missing"),
        ("server.env", {"A": 1}, "server.env.A: expected string, found 1"),
        ("model", {}, "model.path: missing"),
        (
            "shards.min_bytes",
            "0MiB",
            (
                "shards.min_bytes: expected a number of bytes, at least 1, or text such as 512MiB"
                ' or 4GB (smallest shard, but for the last of a source), found "0MiB"'
            ),
        ),
        ("shards.min_bytes", "0.1B", "shards.min_bytes: expected a number of bytes, at least 1"),
        (
            "max_bytes",
            "0B",
            (
                "max_bytes: expected a number of bytes, at least 1, or text such as 512MiB or 4GB,"
                " or null (budget"
            ),
        ),
        pytest.param(
            "shards.min_bytes",
            "1" * 400 + "TiB",
            "shards.min_bytes: expected a number of bytes, at least 1",
            id="beyond a float",
        ),
        (
            "shards.min_bytes",
            "9999999999TiB",
            "shards.min_bytes: expected a number of bytes, at least 1",
        ),
        pytest.param(
            "shards.max_bytes",
            "9" * 5000,
            "shards.max_bytes: expected a number of bytes, at least 1",
            id="thousands of digits",
        ),
        pytest.param(
            "shards.max_bytes",
            10**5000,
            "shards.max_bytes: expected a number of at most 9223372036854775807",
            id="a number of thousands of digits",
        ),
        pytest.param(
            "data.max_tokens",
            "9" * 5000,
            "data.max_tokens: expected integer",
            id="an integer of thousands of digits",
        ),
        pytest.param(
            "server.idle_seconds",
            "9" * 400 + ".0",
            "server.idle_seconds: expected number",
            id="a float of hundreds of digits",
        ),
        (
            "data.template_date",
            datetime.date(2024, 7, 26),
            "data.template_date: expected text, found a date: put it in quotes, '2024-07-26'",
        ),
        (
            "data.template_arguments",
            {"days": [datetime.date(2024, 7, 26)]},
            "data.template_arguments.days[0]: expected text, found a date",
        ),
        (
            "data.template_arguments",
            {7: "x"},
            "data.template_arguments.7: expected text as a key's name, found int: put it in quotes",
        ),
        (
            "results",
            "r3{x}",
            (
                "results: expected a path without control characters, { and }, which are"
                ' Snakemake\'s wildcards (folder for everything that is made), found "r3{x}"'
            ),
        ),
        (
            "data.sources.0.files",
            ["a.jsonl", "part{i}.jsonl"],
            "data.sources[0].files[1]: expected a path without control characters, { and }",
        ),
        *(
            ("results", f"r{mark}3", "results: expected a path without control characters")
            for mark in "\t\r\x1b\x7f\u2028"
        ),
        (
            "data.template_arguments",
            {"x": json.loads("[" * 500 + "]" * 500)},
            f"data.template_arguments.x{'[0]' * 98}: expected at most 100 levels, found more",
        ),
        (
            "model.path",
            "models/{m}",
            "model.path: expected a path without control characters, { and }",
        ),
        ("data.sources.0.files", [""], "data.sources[0].files[0]: expected a path without"),
    ],
)
def test_a_wrong_key_is_named_with_its_path(path: str, value: object, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        config.resolve(edited(path, value), origin="my.yaml")
    assert f"my.yaml: {expected}" in str(caught.value)


def test_answers_are_refused_without_the_final_states_that_verify_them() -> None:
    raw = edited("data.sources.0.answers", {})
    config.resolve(raw, origin="my.yaml")
    raw["capture"]["final_state"] = False
    with pytest.raises(UserError, match="my.yaml: capture.final_state: expected true, since sourc"):
        config.resolve(raw, origin="my.yaml")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"sampling": {"temperature": 1e-7}}, "sampling.temperature: expected 0, or at least 0.01"),
        ({"sampling": {"temperature": 0}, "samples": 3}, "samples: expected 1 at temperature 0"),
    ],
)
def test_draws_that_cannot_differ_or_be_checked_are_refused(answers: dict, expected: str) -> None:
    with pytest.raises(UserError, match=rf"my.yaml: data.sources.0..answers.{expected}"):
        config.resolve(edited("data.sources.0.answers", answers), origin="my.yaml")


def test_two_sources_of_one_name_are_refused() -> None:
    raw = minimal()
    raw["data"]["sources"] *= 2
    with pytest.raises(
        UserError, match="data.sources: expected a different name for each source, found a 2 times"
    ):
        config.resolve(raw, origin="my.yaml")


def test_every_fault_is_named_at_once() -> None:
    raw = edited("foo", 1)
    raw["data"]["max_tokens"] = 0
    with pytest.raises(UserError, match=r"data.max_tokens: .*foo: unknown key"):
        config.resolve(raw, origin="my.yaml")


def test_defaults_are_filled_in_and_sizes_become_numbers() -> None:
    found = config.resolve(
        edited("shards.max_bytes", "1.5GiB") | {"shards": {"min_bytes": 10, "max_bytes": "1.5GiB"}},
        origin="my.yaml",
    )
    assert found.shards.plain() == {
        "min_bytes": 10,
        "max_bytes": 3 << 29,
        "share_prefixes": True,
        "min_shared_tokens": 64,
    }
    assert found.server.launcher == "local"
    assert found.server.queue_bytes == 2 << 30
    assert found.data.sources[0].format == "auto"
    assert found.max_bytes is None
    assert found.model.name == "m"


def test_numbers_that_snakemake_passes_as_text_are_numbers_and_text_stays_text() -> None:
    server = {
        "replicas": "8",
        "idle_seconds": "0.5",
        "args": ["--max-total-tokens", "16384"],
        "slurm": {"poll_seconds": "2"},
    }
    found = config.resolve(edited("server", server), origin="my.yaml").server
    assert (found.replicas, found.idle_seconds, found.args[1], found.slurm.poll_seconds) == (
        8,
        0.5,
        "16384",
        2,
    )
    with pytest.raises(UserError, match=r"server.replicas: expected integer .*found \"eight\""):
        config.resolve(edited("server.replicas", "eight"), origin="my.yaml")


def test_numbers_as_text_are_numbers_in_sources_lists_and_sizes_too() -> None:
    raw = edited("data.sources.0.limit", "50")
    raw["data"]["sources"][0]["weight"] = "0.5"
    raw["data"]["template_arguments"] = {"year": "2024"}
    raw |= {
        "capture": {"residual_layers": ["1", "2"]},
        "max_bytes": "4096",
        "shards": {"min_bytes": "10", "max_bytes": "1KiB"},
    }
    found = config.resolve(raw, origin="my.yaml")
    assert (found.data.sources[0].limit, found.data.sources[0].weight) == (50, 0.5)
    assert found.capture.residual_layers == [1, 2]
    assert (found.max_bytes, found.shards.min_bytes, found.shards.max_bytes) == (4096, 10, 1024)
    assert found.data.template_arguments == {"year": "2024"}


def test_a_resolved_configuration_comes_back_unchanged() -> None:
    found = config.resolve(minimal(), origin="my.yaml")
    assert config.resolve(found.plain(), origin="again") == found


def test_a_resolved_configuration_is_found_again_where_its_content_says(tmp_path: Path) -> None:
    found = config.resolve({**minimal(), "results": str(tmp_path)}, origin="my.yaml")
    path = found.resolved_path
    for damaged in ("", "data: {}\n"):
        config.save_resolved(found)
        path.write_text(damaged)
    config.save_resolved(found)
    assert config.load(path) == found
    assert [path.name for path in (tmp_path / "config").iterdir()] == [path.name]
    other = config.resolve({**found.plain(), "exclude": ["0" * 32]}, origin="my.yaml")
    assert other.resolved_path != path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("a: 2024-13-01", "not valid YAML: month must be in"),
        pytest.param("a: " + "9" * 5000, "not valid YAML", id="thousands of digits"),
        pytest.param("a: " + "[" * 5000, "not valid YAML", id="thousands of levels"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        config.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no.yaml: the configuration cannot be read"):
        config.load(tmp_path / "no.yaml")


def keys(section: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of those in it, with its path."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}", field
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                yield from keys(part, f"{path}{name}.")


KEYS = dict(keys(config.Configuration))


def test_every_default_satisfies_its_own_check() -> None:
    """Defaults are not checked when they are filled in, so a wrong one would go unnoticed."""
    assert {"server.slurm.sbatch", "data.sources.weight", "exports.split"} < set(KEYS)
    resolved = config.resolve(edited("exports", dict.fromkeys(TRAINERS, {})), origin="my.yaml")
    assert config.resolve(resolved.plain(), origin="defaults") == resolved


def test_every_key_has_a_help() -> None:
    assert [path for path, field in KEYS.items() if not field.description] == []


@pytest.mark.parametrize(
    "path", [path for path, field in KEYS.items() if type(field.default) in (int, float)]
)
def test_every_number_can_be_passed_as_text(path: str) -> None:
    """Snakemake passes what --config gives as text."""
    default = KEYS[path].default
    where = path.replace("sources.", "sources.0.").replace("exports.", "exports.specforge.")
    found: object = config.resolve(edited(where, str(default)), origin="my.yaml").plain()
    for name in where.split("."):
        found = found[int(name)] if isinstance(found, list) else found[name]
    assert (found, type(found)) == (default, type(default))


def test_a_configuration_cannot_be_changed() -> None:
    found = config.resolve(minimal(), origin="my.yaml")
    with pytest.raises(ValidationError, match="frozen"):
        found.server.replicas = 2


def test_the_schema_that_users_read_is_that_of_the_code() -> None:
    path = REPOSITORY / "schemas" / "config.schema.yaml"
    assert path.read_text() == config.schema_text(), "run: make schema"


def test_the_schema_accepts_what_the_code_accepts() -> None:
    check = jsonschema.Draft202012Validator(yaml.safe_load(config.schema_text()))
    for path in FILES:
        check.validate(yaml.safe_load(path.read_text()))
        check.validate(config.load(path).plain())
    assert not check.is_valid(edited("data.sources.0.nmae", "x"))


def test_a_file_name_that_is_no_list_is_shown_as_one() -> None:
    with pytest.raises(UserError) as caught:
        config.resolve(edited("data.sources.0.files", "x.jsonl"), origin="my.yaml")
    assert "data.sources[0].files: expected a list: [x.jsonl] (JSONL" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GB", 4 * 10**9), ("1.5 TB", 1_500_000_000_000), ("512kB", 512_000), ("1TiB", 1 << 40)],
)
def test_sizes_have_decimal_and_binary_units(text: str, expected: int) -> None:
    assert config.resolve(edited("max_bytes", text), origin="my.yaml").max_bytes == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "expected a finite number, found nan"),
        (float("inf"), "expected a finite number, found inf"),
        (datetime.date(2026, 1, 1), "expected text, found a date"),
        ({1, 2}, "expected text, numbers, lists and mappings, found set"),
        ("\ud800", "expected text that UTF-8 can hold, found .*ud800"),
    ],
)
def test_what_is_no_text_number_list_or_mapping_is_refused_by_its_key(
    value: object, expected: str
) -> None:
    with pytest.raises(UserError, match=rf"my.yaml: data\.max_skipped_fraction: {expected}"):
        config.resolve(edited("data.max_skipped_fraction", value), origin="my.yaml")


@pytest.mark.parametrize("results", ["file", "file/results", "broken", "broken/results", "x" * 300])
def test_results_that_cannot_be_written_are_named(tmp_path: Path, results: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"results: .*{results} cannot be written"):
        config.check_results(tmp_path / results)
    config.check_results(tmp_path / "new" / "results")
