"""The configuration: what is wrong is named with its path, defaults are filled in, presets and the default hold."""

import datetime
import json
from pathlib import Path

import pytest
import yaml

from draftstates import config
from draftstates.errors import UserError

REPOSITORY = Path(__file__).parents[2]
FILES = [REPOSITORY / "config.yaml", *sorted((REPOSITORY / "presets").glob("*.yaml"))]


def minimal() -> dict:
    return {"data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8}, "model": {"path": "models/m"}, "capture": {}}


def edited(path: str, value: object) -> dict:
    """A minimal configuration with one key, named by its path, set to `value`; `None` as a name removes."""
    raw = minimal()
    at, keys = raw, path.split(".")
    for key in keys[:-1]:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    at[keys[-1]] = value
    return raw


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_default_and_every_preset_hold(path: Path) -> None:
    assert config.load(path)["model"]["name"]


def test_there_is_a_preset_for_each_promised_model() -> None:
    assert {path.stem for path in FILES} >= {"smollm2", "qwen3-8b", "llama-3.1-8b", "deepseek-v3", "kimi-k2.5"}


def test_kimi_is_captured_as_it_was_first_run() -> None:
    kimi = config.load(REPOSITORY / "presets" / "kimi-k2.5.yaml")
    assert kimi["capture"]["residual_layers"] == [3, 31, 59]
    assert kimi["server"]["tensor_parallel"] == 8


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("data.sources.0.nmae", "x", "data.sources[0].nmae: unknown key (did you mean name?)"),
        ("foo", 1, "foo: unknown key"),
        ("server.replica", 2, "server.replica: unknown key (did you mean replicas?)"),
        ("data.max_tokens", "many", 'data.max_tokens: expected integer (longest sample in tokens), found "many"'),
        ("data.sources", [], "data.sources: expected at least 1 entry"),
        ("data.sources.0.name", "a/b", "data.sources[0].name: expected text like"),
        (
            "data.over_long",
            "drop",
            'data.over_long: expected one of skip, cut (a longer sample is skipped, or cut at the end of a turn), found "drop"',
        ),
        ("capture.residual_layers", "eagle", "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", [2, 2], "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", [4, 2], "capture.residual_layers: expected ascending numbers, found [4, 2]"),
        ("max_bytes", "4 Gb", "max_bytes: expected budget for the states on the disk"),
        ("capture.residual_layers", [1.0, 2], "capture.residual_layers: expected eagle3"),
        ("capture.residual_layers", ["1.0"], "capture.residual_layers: expected eagle3"),
        ("data.max_tokens", 8.0, "data.max_tokens: expected integer (longest sample in tokens), found 8.0"),
        ("data.sources.0.limit", 1.5, "data.sources[0].limit: expected integer (read only this many rows), found 1.5"),
        ("data.sources.0.limit", "ten", 'data.sources[0].limit: expected integer (read only this many rows), found "ten"'),
        ("data.sources.0.name", "a\n", "data.sources[0].name: expected text like"),
        ("data.sources.0.name", " a", "data.sources[0].name: expected text like"),
        ("model.name", "m ", "model.name: expected text like"),
        ("model.name", "m\n", "model.name: expected text like"),
        ("model.path", "models/m ", "model.name: missing: the folder's name, 'm ', cannot name a results folder"),
        ("server.url", "http://h:1\n", "server.url: expected text like"),
        ("server.data_parallel_attention", 2, "server.data_parallel_attention: expected a divisor of tensor_parallel, 1, found 2"),
        ("server.args", ["--dp-size=2"], "server.args: --dp-size is not for here: use server.replicas, or server.data_parallel"),
        ("server.args", ["--tp", "2"], "server.args: --tp is not for here: use server.tensor_parallel"),
        ("server.args", ["--pp-size", "2"], "server.args: --pp-size is not for here: a pipeline parallel server cannot be captured"),
        ("server.args", ["--quantization", "fp8"], "server.args: --quantization is not for here: it changes the captured numbers"),
        ("server.args", ["--kv-cache-dt=fp8_e4m3"], "server.args: --kv-cache-dt is not for here: it changes the captured numbers"),
        ("server.args", ["--dtype", "float16"], "server.args: --dtype is not for here: use capture.compute_dtype"),
        ("server.args", ["--model", "other"], "server.args: --model is not for here: use model.path"),
        ("server.args", ["--config", "more.yaml"], "server.args: --config is not for here: the workflow says it itself"),
        ("server.args", ["--nnodes", "2"], "server.args: --nnodes is not for here: a server is on one node"),
        ("shards.min_bytes", "1TiB", "shards.max_bytes: expected at least twice shards.min_bytes"),
        ("shards.min_bytes", "9GiB", "shards.max_bytes: expected at least twice shards.min_bytes (9,663,676,416), found 17,179,869,184"),
        ("checks.probe_fraction", 1.5, "checks.probe_fraction: expected at most 1"),
        ("exclude", ["short"], "exclude[0]: expected text like"),
        ("server.launcher", "kubernetes", "server.launcher: expected one of local, slurm, external"),
        ("server.launcher", "external", "server.url: missing"),
        ("server.env", {"A": 1}, "server.env.A: expected string, found 1"),
        ("model", {}, "model.path: missing"),
        ("shards.min_bytes", "0MiB", "shards.min_bytes: expected a number of bytes, at least 1, or text such as 512MiB or 4GiB, found 0"),
        ("shards.min_bytes", "0.1B", "shards.min_bytes: expected a number of bytes, at least 1"),
        ("max_bytes", "0B", "max_bytes: expected budget for the states on the disk"),
        pytest.param(
            "shards.min_bytes", "1" * 400 + "TiB", "shards.min_bytes: expected a number of bytes, at least 1", id="beyond a float"
        ),
        ("shards.min_bytes", "9999999999TiB", "shards.min_bytes: expected a number of bytes, at least 1"),
        pytest.param("shards.max_bytes", "9" * 5000, "shards.max_bytes: expected a number of bytes, at least 1", id="thousands of digits"),
        pytest.param(
            "shards.max_bytes",
            10**5000,
            "shards.max_bytes: expected a number of at most 9223372036854775807",
            id="a number of thousands of digits",
        ),
        pytest.param("data.max_tokens", "9" * 5000, "data.max_tokens: expected integer", id="an integer of thousands of digits"),
        pytest.param("server.idle_seconds", "9" * 400 + ".0", "server.idle_seconds: expected number", id="a float of hundreds of digits"),
        (
            "data.template_date",
            datetime.date(2024, 7, 26),
            "data.template_date: expected text, found a date: put it in quotes, '2024-07-26'",
        ),
        ("data.template_arguments", {"days": [datetime.date(2024, 7, 26)]}, "data.template_arguments.days[0]: expected text, found a date"),
        ("data.template_arguments", {7: "x"}, "data.template_arguments.7: expected text as a key's name, found int: put it in quotes"),
        ("results", "r3{x}", "results: expected text like ^[^{}]*$ (a path without { and }, which Snakemake takes for wildcards)"),
        (
            "data.sources.0.files",
            ["a.jsonl", "part{i}.jsonl"],
            "data.sources[0].files[1]: expected text like ^[^{}]*$ (a path without { and }",
        ),
        ("model.path", "models/{m}", "model.path: expected text like ^[^{}]*$ (a path without { and }"),
        ("data.sources.0.files", [""], "data.sources[0].files[0]: expected some text (a path"),
    ],
)
def test_a_wrong_key_is_named_with_its_path(path: str, value: object, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        config.resolve(edited(path, value), origin="my.yaml")
    assert f"my.yaml: {expected}" in str(caught.value)


def test_two_sources_of_one_name_are_refused() -> None:
    raw = minimal()
    raw["data"]["sources"] *= 2
    with pytest.raises(UserError, match="data.sources: expected a different name for each source, found a 2 times"):
        config.resolve(raw, origin="my.yaml")


def test_every_fault_is_named_at_once() -> None:
    raw = edited("foo", 1)
    raw["data"]["max_tokens"] = 0
    with pytest.raises(UserError, match=r"data.max_tokens: .*foo: unknown key"):
        config.resolve(raw, origin="my.yaml")


def test_defaults_are_filled_in_and_sizes_become_numbers() -> None:
    found = config.resolve(edited("shards.max_bytes", "1.5GiB") | {"shards": {"min_bytes": 10, "max_bytes": "1.5GiB"}}, origin="my.yaml")
    assert found["shards"] == {"min_bytes": 10, "max_bytes": 3 << 29}
    assert found["server"]["launcher"] == "local"
    assert found["server"]["queue_bytes"] == 2 << 30
    assert found["data"]["sources"][0]["format"] == "auto"
    assert found["max_bytes"] is None
    assert found["model"]["name"] == "m"


def test_numbers_that_snakemake_passes_as_text_are_numbers_and_text_stays_text() -> None:
    server = {"replicas": "8", "idle_seconds": "0.5", "args": ["--max-total-tokens", "16384"], "slurm": {"poll_seconds": "2"}}
    found = config.resolve(edited("server", server), origin="my.yaml")["server"]
    assert (found["replicas"], found["idle_seconds"], found["args"][1], found["slurm"]["poll_seconds"]) == (8, 0.5, "16384", 2)
    with pytest.raises(UserError, match=r"server.replicas: expected integer .*found \"eight\""):
        config.resolve(edited("server.replicas", "eight"), origin="my.yaml")


def test_numbers_as_text_are_numbers_in_sources_lists_and_sizes_too() -> None:
    raw = edited("data.sources.0.limit", "50")
    raw["data"]["sources"][0]["weight"] = "0.5"
    raw["data"]["template_arguments"] = {"year": "2024"}
    raw |= {"capture": {"residual_layers": ["1", "2"]}, "max_bytes": "4096", "shards": {"min_bytes": "10", "max_bytes": "1KiB"}}
    found = config.resolve(raw, origin="my.yaml")
    assert (found["data"]["sources"][0]["limit"], found["data"]["sources"][0]["weight"]) == (50, 0.5)
    assert found["capture"]["residual_layers"] == [1, 2]
    assert (found["max_bytes"], found["shards"]["min_bytes"], found["shards"]["max_bytes"]) == (4096, 10, 1024)
    assert found["data"]["template_arguments"] == {"year": "2024"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "text_config"])
def test_layers_that_the_model_does_not_have_are_named_at_once_where_the_model_is_there(tmp_path: Path, wrapped: bool) -> None:
    model = tmp_path / "m"
    model.mkdir()
    layers = {"num_hidden_layers": 6}
    (model / "config.json").write_text(json.dumps({"text_config": layers} if wrapped else layers))
    raw = edited("model.path", str(model))
    for chosen, expected in (([2, 7], r"expected k in 0\.\.6, .* found \[2, 7\]"), ("eagle3", "eagle3 needs at least 7 layers")):
        raw["capture"]["residual_layers"] = chosen
        with pytest.raises(UserError, match=f"my.yaml: capture.residual_layers: {expected}"):
            config.resolve(raw, origin="my.yaml")
    raw["capture"]["residual_layers"] = [2, 6]
    assert config.resolve(raw, origin="my.yaml")["capture"]["residual_layers"] == [2, 6]


@pytest.mark.parametrize("text", [b"", b"[1, 2]", b"\xff\x00", b"{}", b'{"num_hidden_layers": "six"}', b'{"text_config": 3}'])
def test_a_model_that_cannot_be_read_yet_is_left_to_the_plan(tmp_path: Path, text: bytes) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_bytes(text)
    raw = edited("model.path", str(model))
    raw["capture"]["residual_layers"] = [2, 70]
    assert config.resolve(raw, origin="my.yaml")["model"]["name"] == "m"


def test_a_resolved_configuration_comes_back_unchanged() -> None:
    found = config.resolve(minimal(), origin="my.yaml")
    assert config.resolve(found, origin="again") == found


def test_a_resolved_configuration_is_found_again_where_its_content_says(tmp_path: Path) -> None:
    found = config.resolve({**minimal(), "results": str(tmp_path)}, origin="my.yaml")
    config.save_resolved(found)
    path = config.resolved_path(found)
    assert config.load(path) == found
    assert [path.name for path in (tmp_path / "config").iterdir()] == [path.name]
    assert config.resolved_path({**found, "exclude": ["0" * 32]}) != path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("a: 2024-13-01", "not valid YAML: month must be in"),
        pytest.param("a: " + "9" * 5000, "not valid YAML", id="thousands of digits"),
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


def test_every_default_in_the_schema_satisfies_the_schema() -> None:
    """Defaults are filled in after validation, so a wrong one would go unnoticed."""
    resolved = config.resolve(minimal(), origin="my.yaml")
    config.resolve(resolved, origin="defaults")
    schema = yaml.safe_load(config.SCHEMA.read_text())
    assert set(resolved) == set(schema["properties"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "expected a finite number, found nan"),
        (float("inf"), "expected a finite number, found inf"),
        (datetime.date(2026, 1, 1), "expected text, found a date"),
        ({1, 2}, "expected text, numbers, lists and mappings, found set"),
    ],
)
def test_what_is_no_text_number_list_or_mapping_is_refused_by_its_key(value: object, expected: str) -> None:
    with pytest.raises(UserError, match=rf"my.yaml: data\.max_skipped_fraction: {expected}"):
        config.resolve(edited("data.max_skipped_fraction", value), origin="my.yaml")


@pytest.mark.parametrize("results", ["file", "file/results", "broken", "broken/results"])
def test_results_that_cannot_be_written_are_named(tmp_path: Path, results: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"results: .*{results} cannot be written"):
        config.check_results({"results": str(tmp_path / results)})
    config.check_results({"results": str(tmp_path / "new" / "results")})


def test_a_model_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    model = {"path": str(tmp_path / "m"), "prepare": "none"}
    with pytest.raises(UserError, match="model.path: .*m has no config.json: put the model there"):
        config.check_model({"model": model})
    config.check_model({"model": {**model, "prepare": "smollm2"}})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    config.check_model({"model": model})
