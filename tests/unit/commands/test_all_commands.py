"""All commands: bad input is one line and no traceback, and JSON is what a program can read."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from results_tree import WordTokenizer, make_results
from synthetic import capture_spec, small, write_manifest

from draftstates.commands import cli

MISSING = "no/such/place"
# Each command with all that it requires; FILE stands for a file or folder that is wrong.
CALLS = {
    "doctor": ["--config", "FILE"],
    "status": ["--results", "FILE", "--once"],
    "accounting": ["--results", "FILE"],
    "show": ["FILE", "--tokenizer", "FILE"],
    "parity": ["--shard", "FILE", "--model", "FILE", "--compute-dtype", "float32"],
    "export": ["--manifest", "FILE", "--trainer", "specforge", "--output", "OUT"],
    "compact": ["--manifest", "FILE", "--output", "OUT", "--fp8", "layers"],
    "prune": ["--results", "FILE"],
    "serve": ["--config", "FILE", "--plan", "FILE"],
}


def wrong_files(folder: Path) -> list[str]:
    """Return a missing file, an empty one, one of random bytes, JSON of another kind, a folder."""
    (folder / "empty").touch()
    (folder / "bytes").write_bytes(bytes(range(256)) * 8)
    (folder / "json").write_text('{"format": "other", "shards": 3}')
    (folder / "folder").mkdir()
    return [MISSING, *(str(folder / name) for name in ("empty", "bytes", "json", "folder"))]


@pytest.fixture(autouse=True)
def _tracebacks_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cli.TRACEBACK, raising=False)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_bad_input_is_an_error_of_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in wrong_files(tmp_path):
        arguments = [
            wrong if part == "FILE" else str(tmp_path / "out") if part == "OUT" else part
            for part in CALLS[name]
        ]
        with pytest.raises(SystemExit) as end:
            cli.main([name, *arguments])
        said = str(end.value.code)
        assert said.startswith("error: "), (wrong, said)
        assert "a fault of draftstates itself" not in said, wrong
        # the error says which of its arguments is wrong, or which file below it
        assert wrong in said, (wrong, said)
        assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_comparison_of_no_samples_is_no_success() -> None:
    with pytest.raises(SystemExit, match="error: --samples: expected at least 1, found 0"):
        cli.main(["parity", *CALLS["parity"], "--samples", "0"])


def test_every_command_has_a_call_here() -> None:
    assert set(CALLS) == set(cli.COMMANDS)


def test_a_fault_of_the_package_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("shard")

    monkeypatch.setattr(importlib.import_module("draftstates.commands.prune"), "main", fail)
    with pytest.raises(SystemExit, match="error: KeyError: 'shard': a fault of draftstates itself"):
        cli.main(["prune"])
    monkeypatch.setenv(cli.TRACEBACK, "1")
    with pytest.raises(KeyError):
        cli.main(["prune"])


def test_a_reader_that_stops_reading_gets_no_traceback() -> None:
    code = (
        "from draftstates.errors import run_command\n"
        "run_command(lambda: [print('x' * 1000) for _ in range(10_000)])"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout
    assert writer.stderr
    writer.stdout.read(1)
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait() == 141


# ---- JSON ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("all") / "results"
    make_results(folder)
    return folder


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command with --json, and return what it prints."""

    def run(*arguments: object) -> Any:
        capsys.readouterr()
        cli.main([*map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out)

    return run


def test_what_a_program_reads_of_a_run(results: Path, read: Callable[..., Any]) -> None:
    status = read("status", "--results", results)
    assert (status["planned"], status["captured"], status["done"]) == (2, 2, True)
    assert status["done_tokens"] == status["tokens"] > 0
    accounting = read("accounting", "--results", results)
    assert accounting["totals"]["tokens"] == status["tokens"]
    assert accounting["totals"]["skipped"] == accounting["sources"]["demo"]["skipped"]
    assert Path(accounting["manifest"]).exists()
    nothing = {"shards": [], "unfinished": [], "answers": [], "removed": False}
    assert read("prune", "--results", results) == nothing


def test_samples_as_json(
    results: Path, read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = importlib.import_module("draftstates.commands.show")
    monkeypatch.setattr(show, "load_tokenizer", lambda *_, **__: WordTokenizer())
    tokens = results / "tokens" / "demo.parquet"
    (sample,) = read("show", tokens, "--tokenizer", "none", "--row", 1)
    assert (sample["source"], sample["row"]) == ("demo", 1)
    assert len(sample["input_ids"]) == len(sample["loss_mask"])
    assert {piece["supervised"] for piece in sample["pieces"]} == {True, False}


def test_copies_as_json(tmp_path: Path, read: Callable[..., Any]) -> None:
    made = small(tmp_path / "made")
    compact = read(
        "compact", "--manifest", made.path, "--output", tmp_path / "c", "--fp8", "layers"
    )
    assert compact["tokens"] == sum(len(s["input_ids"]) for s in made.samples.values())
    export = read(
        *("export", "--manifest", made.path, "--trainer", "speculators"),
        *("--output", tmp_path / "e"),
    )
    assert export["tokens"] == compact["tokens"]
    assert export["output"] == str(tmp_path / "e")


@pytest.mark.parametrize("fault", [0.0, 0.5])
def test_parity_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: float) -> None:
    """The distances are printed, and a layer that is wrong is an error all the same."""
    shard = captured_from_a_model(tmp_path / "model", tmp_path / "capture", fault=fault)
    asked = ["parity", "--shard", shard, "--model", tmp_path / "model"]
    arguments = [*map(str, asked), "--compute-dtype", "float32", "--json"]
    if fault:
        with pytest.raises(SystemExit, match="error: sample .*r_2"):
            cli.main(arguments)
    else:
        cli.main(arguments)
    (sample,) = json.loads(capsys.readouterr().out)
    worst = {layer["layer"]: layer["worst"] for layer in sample["layers"]}
    assert worst.keys() == {"r_1", "r_2", "r_3", "post_norm"}
    assert (worst["r_2"] > 0.1) == bool(fault)


def captured_from_a_model(model: Path, capture: Path, *, fault: float) -> Path:
    """Write a tiny model and a shard of its states; r_2 is off by a share of its norm."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    made.save_pretrained(model)
    ids = torch.arange(3, 43)
    with torch.no_grad():
        states = made.model(ids[None], output_hidden_states=True).hidden_states
    layers = torch.stack([state[0] for state in states[1:4]], dim=1)
    layers[:, 1] *= 1 + fault
    spec = capture_spec(
        layers=(1, 2, 3),
        num_layers=4,
        hidden_size=64,
        final_norm="post_norm",
        stored_dtype="float32",
    )
    sample = {
        "input_ids": ids.int(),
        "loss_mask": torch.ones(40, dtype=torch.uint8),
        "hidden_states": layers,
        "final_hidden_state": states[4][0],
    }
    write_manifest(capture, [[sample]], spec=spec)
    return next(capture.glob("shards/*.safetensors"))
