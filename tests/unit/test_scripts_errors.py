"""Whatever a path that is handed to a command leads to, the answer is one line that names it, never
a traceback.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from captured import capture, tiny_model, verify, write
from synthetic import small
from token_kit import REPOSITORY, chat, run_cli, run_script, run_source, tokenizer_folder

from draftstates.answers.key import answers_folder
from draftstates.commands import cli
from draftstates.config import load
from draftstates.errors import run_command

FAULTS = {
    "no such path": None,
    "a folder": "folder",
    "an empty file": b"",
    "rubbish": b"\xff\xfe\x00PAR1 \x80{[",
    "JSON of another shape": b"[1, 2]",
    "JSON of another kind": b'{"a": {"b": 1}}',
}
FORMATS = {
    "plan": (
        b'{"format": "draftstates.plan", "format_version": 2, "capture_folder": 7, "shards": [{}]}'
    ),
    "manifest": (
        b'{"format": "draftstates.manifest", "format_version": 2, "capture": [], "shards": {}}'
    ),
    "receipts": b'{"format": "draftstates.receipts", "format_version": 2, "samples": 3}',
}
COMMANDS = {
    "check_parity": (
        "--config {config} --plan {plan} --code 0 --threads 1 --html {out}/parity.html"
        " --output {out}/{folder_name}/parity.json"
    ),
    "accounting": "--results {results}",
    "answers": (
        "--config {config} --source asked --prompts {prompts} --chunk-id {shard_id} --output"
        " {out}/{answers}/chunk.parquet"
    ),
    "compact": "--manifest {manifest} --output {out} --fp8 all --keep-top-token {model}",
    "doctor": "--config {config}",
    "export": "--manifest {manifest} --trainer speculators --output {out} --model {model}",
    "hub_data": "--source test --config {config} --output {out}/hub.json",
    "extract": (
        "--config {config} --plan {plan} --shard-id {shard_id} --tokens {shard_tokens} --output"
        " {out}/{folder_name}/shards/shard"
    ),
    "manifest": (
        "--plan {plan} --capture-folder {run} --parity auto --output {out}/manifest.json"
        " --samples {out}/samples.parquet"
    ),
    "parity": "--shard {shard} --model {model} --compute-dtype float32",
    "prompts": (
        "--config {config} --source asked --tokenizer {tokenizer} --output {out}/p.parquet"
    ),
    "plan": "--config {config} --tokens {tokens} --model {model} --output {out}/plan.json",
    "serve": "--config {config} --plan {plan}",
    "server": "--config {config} --plan {plan} --output {out}/{folder_name}/server.json",
    "status": "--results {results} --once",
    "report_page": "{plan} --tokenizer {tokenizer} --output {out}/r.html",
    "store": (
        "--config {config} --plan {plan} --shard-id {shard_id} --model {model} --shard {shard}"
        " --verified {verified} --threads 1 --record {out}/{folder_name}/compact/e4m3/s.json"
        " --output {out}/{folder_name}/compact/e4m3/s.safetensors"
    ),
    "show": "{tokens} --tokenizer {tokenizer}",
    "tokenise": (
        "--config {config} --source test --tokenizer {tokenizer} --output {out}/t.parquet"
        " --accounting {out}/t.json"
    ),
    "verify": (
        "--plan {plan} --shard-id {shard_id} --model {model} --shard {shard}"
        " --recaptures {recaptures}"
        " --receipts {receipts} --output {out}/{folder_name}/verified/v"
    ),
    "vocabulary": "{plan} --draft-size 8 --model {model} --output {out}",
}
NOT_INPUTS = {"out", "shard_id"}
FOLDERS = {"model", "tokenizer", "run", "results"}
# they read what the repository has, make a folder, take any folder
UNTRIED = {"images", "prepare_demo_model", "prune"}


class Case(NamedTuple):
    """One path of one command, and what is wrong with it."""

    command: str
    path: str
    fault: str
    content: object


def cases() -> Iterator[Case]:
    for command, line in COMMANDS.items():
        for path in [
            part.strip("{}") for part in line.split() if part.startswith("{") and "}" in part
        ]:
            path = path.split("}")[0]
            if path in NOT_INPUTS:
                continue
            for fault, content in FAULTS.items():
                yield Case(command, path, fault, content)
            if path in FORMATS:
                yield Case(command, path, "right format, wrong content", FORMATS[path])


def call(name: str, *arguments: str) -> None:
    """Run a rule's script or a command of `draftstates`."""
    if name in cli.COMMANDS:
        run_cli(name, *arguments)
    else:
        run_script(f"{name}.py", *arguments)


def test_every_command_that_is_handed_a_path_is_tried() -> None:
    scripts = {path.stem for path in (REPOSITORY / "scripts").glob("*.py")}
    assert set(COMMANDS) == (scripts | set(cli.COMMANDS)) - UNTRIED
    assert scripts & set(cli.COMMANDS) == {"export"}


def test_an_error_of_the_system_that_is_about_no_file_is_not_hidden() -> None:
    def main() -> None:
        raise ConnectionResetError(104, "reset")

    with pytest.raises(ConnectionResetError):
        run_command(main)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, object]:
    """Paths that are as they should be, by the names in COMMANDS."""
    folder = tmp_path_factory.mktemp("good")
    captured = capture(tiny_model(folder / "model"))
    folder_name = captured.spec.folder_name
    files = write(captured, folder / folder_name / "shards")
    files.plan.publish(folder / "plan.json")
    verify(files).publish(folder / "verified.json")
    run_source(folder, [{"messages": chat(f"Q{n}", f"A{n}")} for n in range(4)])
    config = {
        "data": {
            "sources": [
                {"name": "test", "files": [str(folder / "rows.jsonl")]},
                {"name": "asked", "files": [str(folder / "rows.jsonl")], "answers": {}},
            ],
            "max_tokens": 64,
        },
        "model": {"path": str(files.model)},
        "capture": {"residual_layers": [1, 2]},
        "results": str(folder / "results"),
        "server": {"launcher": "external", "url": "http://127.0.0.1:9"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return {
        **{
            "plan": folder / "plan.json",
            "run": folder / folder_name,
            "folder_name": folder_name,
            "config": folder / "config.yaml",
            "model": files.model,
        },
        **{
            "manifest": small(folder / "synthetic").path,
            "tokens": folder / "test.parquet",
            "tokenizer": tokenizer_folder("smollm2"),
        },
        **{
            "shard": files.shard,
            "recaptures": files.recaptures,
            "receipts": files.receipts,
            "verified": folder / "verified.json",
            "shard_id": files.shard_id,
        },
        **{"shard_tokens": folder / "none.parquet", "results": folder},
        "prompts": folder / "prompts.parquet",
        "answers": answers_folder(load(folder / "config.yaml"), "asked"),
    }


@pytest.mark.parametrize(
    "case", list(cases()), ids=lambda case: f"{case.command}: {case.path}: {case.fault}"
)
def test_a_path_that_leads_to_something_else_is_named_in_one_line(
    case: Case, good: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / f"given-{case.path}.json"
    if case.content == "folder":
        path.mkdir()
    elif isinstance(case.content, bytes) and case.path in FOLDERS and case.fault != "an empty file":
        path.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (path / name).write_bytes(case.content)
    elif isinstance(case.content, bytes):
        path.write_bytes(case.content)
    values = {**good, "out": tmp_path / "out", case.path: path}
    line = [part.format(**values) for part in COMMANDS[case.command].split()]
    with pytest.raises(SystemExit) as end:
        call(case.command, *line)
    message = str(end.value.code)
    assert message.startswith("error: ")
    assert str(path) in message
    assert not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.parametrize(
    "command", ["check_parity", "extract", "manifest", "server", "store", "verify"]
)
def test_what_is_of_the_plans_run_goes_into_no_other_folder(
    command: str, good: dict[str, object], tmp_path: Path
) -> None:
    """Jobs of a run whose plan was replaced by that of another model."""
    other = tmp_path / "out" / "other-12345678"
    line = [
        part.format(**{**good, "out": tmp_path / "out", "folder_name": other.name, "run": other})
        for part in COMMANDS[command].split()
    ]
    with pytest.raises(SystemExit) as end:
        call(command, *line)
    assert f"{other}: expected the plan's capture folder, {good['folder_name']}" in str(
        end.value.code
    )
    assert not other.exists()
