"""A whole run with answers by the target model, on servers that the run starts: the answering ones
first, then those that capture. And what verification says where the two kinds differ.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from answer_kit import says, stub_server
from workspace import Workspace, chat, make_tiny_model, make_workspace

from draftstates.records import Prompts
from draftstates.tokens.answered import read_answers

REPOSITORY = Path(__file__).parents[2]
ANSWERS = {
    "turns": "all",
    "samples": 2,
    "chunk": 6,
    "sampling": {"temperature": 0.7, "top_p": 0.95, "max_new_tokens": 12},
}
GREEDY = {"turns": "last", "sampling": {"temperature": 0, "max_new_tokens": 10}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    """Make a run of three sources: answers to all turns, greedy answers to the last, and data."""
    workspace = make_workspace(
        tmp_path_factory.mktemp("answers") / "work", tiny_model, standins=False
    )
    config = workspace.config
    sources = config["data"]["sources"]
    sources[0]["answers"], sources[1]["answers"] = ANSWERS, GREEDY
    sources.append({"name": "three", "files": ["three.jsonl"]})
    config["shards"] = {"min_bytes": "128KiB", "max_bytes": "512KiB"}
    config["checks"] = {"parity_tokens": 64}
    config["server"] = {"args": ["--max-total-tokens", "16384"], "queue_bytes": "64MiB"}
    workspace.write_rows([chat(f"one-{i}") for i in range(12)], "one")
    workspace.write_rows([chat(f"two-{i}") for i in range(8)], "two")
    workspace.write_rows([chat(f"three-{i}") for i in range(4)], "three")
    workspace.first = workspace.run("--printshellcmds")
    return workspace


def answers_of(workspace: Workspace, source: str) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted((workspace.results / "answers" / source).glob("*/*.parquet"))
        for row in read_answers(file)[0].to_pylist()
    ]


def manifest_of(workspace: Workspace) -> dict[str, Any]:
    folder = workspace.results / workspace.plan()["capture_folder"]
    return json.loads((folder / "manifest.json").read_text())


def test_generation_ends_before_the_capture_begins(finished: Workspace) -> None:
    jobs = re.findall(
        r"^(?:local)?(?:rule|checkpoint) (\w+):$", finished.first.output, re.MULTILINE
    )
    assert jobs.count("prompts") == 2
    assert jobs.count("answer") >= 3
    last = len(jobs) - 1 - jobs[::-1].index("answer")
    assert last < jobs.index("server")
    log = (finished.results / ".server").rglob("*.log")
    assert {path.name for path in log} >= {"generate.log", "server.log"}


def test_every_sampled_token_is_supervised_and_compared(finished: Workspace) -> None:
    manifest = manifest_of(finished)
    sampled = {name: answers_of(finished, name) for name in ("one", "two")}
    counts = {name: sum(len(row["output_ids"]) for row in rows) for name, rows in sampled.items()}
    for name, count in counts.items():
        account = manifest["sources"][name]
        assert account["supervised_tokens"] == count
        assert account["answers"]["prompts"] == account["answers"]["answered"] == account["rows_in"]
        assert account["answers"]["sampled_tokens"] == count
    assert "answers" not in manifest["sources"]["three"]
    assert manifest["checks"]["answer_tokens"] == sum(counts.values())
    assert 0 < manifest["checks"]["answers_share_of_limit"] < 0.5
    # two turns of two samples of 12 prompts; the last turn of 8
    assert [len(rows) for rows in sampled.values()] == [48, 8]


def test_a_samples_ids_are_the_sent_and_the_sampled_ones(finished: Workspace) -> None:
    samples = pq.read_table(finished.results / "tokens" / "one.parquet").to_pylist()
    assert len(samples) == 24
    held = {tuple(sample["input_ids"]) for sample in samples}
    turns = answers_of(finished, "one")
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        ids = first["prompt_ids"] + first["output_ids"]
        # the next turn goes on from the sampled ids
        assert second["prompt_ids"][: len(ids)] == ids
        assert tuple(second["prompt_ids"] + second["output_ids"]) in held


def test_later_turns_reuse_their_prefix(finished: Workspace) -> None:
    turns = answers_of(finished, "one")
    later = [row for row in turns if row["turn"] == 1]
    assert sum(row["cached_tokens"] for row in later) > 0.5 * sum(
        len(row["prompt_ids"]) for row in later
    )


def test_a_second_run_does_nothing(finished: Workspace) -> None:
    assert finished.run().nothing_to_be_done


def test_the_report_shows_the_answers(finished: Workspace) -> None:
    page = (finished.results / "report" / "index.html").read_text()
    assert "Answers by the target model" in page
    assert re.search(
        r"one: answers by the target model: 12 prompts, 12 answered", finished.first.output
    )


def test_a_changed_row_answers_its_prompt_alone(tmp_path: Path, tiny_model: Path) -> None:
    """A stub server answers: the target `answers` needs no other."""
    end = says("<|im_end|>")
    with stub_server(lambda ids: [*ids[-6:-1], *end]) as server:
        workspace = make_workspace(tmp_path / "work", tiny_model, standins=False)
        config = workspace.config
        config["data"]["sources"] = [{"name": "one", "files": ["one.jsonl"], "answers": GREEDY}]
        config["server"] = {"launcher": "external", "url": server.url}
        workspace.write_rows([chat(f"one-{i}") for i in range(6)], "one")
        first = workspace.run("answers")
        assert (first.jobs("answer"), first.jobs("tokenise"), len(server.requests)) == (1, 0, 6)
        assert workspace.run("answers").nothing_to_be_done
        workspace.write_rows([chat(f"one-{i}") for i in (0, 1, 9, 3, 4)], "one")
        second = workspace.run("results/tokens/one.parquet")
        assert (second.jobs("answer"), second.jobs("tokenise"), len(server.requests)) == (1, 1, 7)
        accounting = json.loads((workspace.results / "tokens" / "one.json").read_text())
        assert (accounting["kept"], accounting["answers"]["answered"]) == (5, 5)
        # an edited script or rule answers nothing a second time
        workspace.edit("rules/answers.smk", "--chunk-id", " --chunk-id")
        workspace.edit("draftstates/answers/client.py", "1.0, 5.0", "1.0, 6.0")
        assert workspace.run("answers").jobs("answer") == 0
        assert len(server.requests) == 7
        check_killed_jobs_are_made(workspace)


def check_killed_jobs_are_made(workspace: Workspace) -> None:
    """Kill the job of each rule; the next run must make it."""
    for rule, script in (("prompts", "prompts.py"), ("answer", "answers.py")):
        flags = ["--forcerun", "prompts"]
        if rule == "answer":
            flags = []
            next((workspace.results / "answers" / "one").glob("*/*.parquet")).unlink()
        path = workspace.folder / "scripts" / script
        whole = path.read_bytes()
        path.write_text("import os\nos.kill(os.getpid(), 9)\n")
        assert workspace.snakemake("answers", *flags).returncode != 0
        path.write_bytes(whole)
        assert workspace.run("answers").jobs(rule) == 1, f"{rule}: the killed job is forgotten"


def shard_of(workspace: Workspace, source: str) -> dict[str, Any]:
    return next(each for each in workspace.plan()["shards"] if each["source"] == source)


def verified(
    workspace: Workspace, shard: dict[str, Any], folder: Path, *, model: Path, tokens: Path
) -> str:
    """Verify a shard again as the rule does, with other files; return what is said."""
    capture = workspace.results / workspace.plan()["capture_folder"]
    place = folder / workspace.plan()["capture_folder"] / "verified"
    place.mkdir(parents=True)
    files = capture / "shards" / shard["shard_id"]
    command = [sys.executable, REPOSITORY / "scripts" / "verify.py", "--threads", "1"]
    command += ["--plan", workspace.results / "plan.json", "--shard-id", shard["shard_id"]]
    command += ["--model", model, "--shard", f"{files}.safetensors"]
    command += ["--recaptures", f"{files}.recaptures.safetensors"]
    command += ["--receipts", f"{files}.receipts.json", "--tokens", tokens]
    command += ["--output", place / f"{shard['shard_id']}.json"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert (done.returncode == 0) == (place / f"{shard['shard_id']}.json").exists()
    return done.stderr


def tokens_of(workspace: Workspace, shard: dict[str, Any]) -> Path:
    return workspace.results / "tokens" / "shards" / f"{shard['shard_id']}.parquet"


def changed_tokens(workspace: Workspace, shard: dict[str, Any], path: Path, change: Any) -> Path:
    """Write a shard's tokens with other log probabilities or temperatures."""
    table = pq.read_table(tokens_of(workspace, shard))
    rows = [{**row, **change(row)} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return path


def test_the_untouched_shard_passes(finished: Workspace, tmp_path: Path) -> None:
    shard = shard_of(finished, "one")
    files = {"model": finished.folder / "models" / "tiny", "tokens": tokens_of(finished, shard)}
    assert "error" not in verified(finished, shard, tmp_path, **files)


def test_another_temperature_is_refused(finished: Workspace, tmp_path: Path) -> None:
    shard = shard_of(finished, "one")
    tokens = changed_tokens(
        finished, shard, tmp_path / "tokens.parquet", lambda row: {"temperature": 0.6}
    )
    said = verified(
        finished, shard, tmp_path / "out", model=finished.folder / "models" / "tiny", tokens=tokens
    )
    assert "answers: the two servers differ" in said


def test_another_template_at_generation_is_refused(finished: Workspace, tmp_path: Path) -> None:
    """The log probabilities are those of a server that saw one more token before each prompt."""
    from transformers import AutoModelForCausalLM

    shard = shard_of(finished, "two")
    folder = finished.folder / "models" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(row: dict[str, Any], before: list[int]) -> dict[str, Any]:
        ids = torch.tensor([[*before, *row["input_ids"]]])
        with torch.no_grad():
            found = model(ids).logits[0, len(before) :].log_softmax(-1)
        places = np.flatnonzero(row["loss_mask"])
        own = torch.tensor(row["input_ids"])[places]
        return {"logprobs": found[places - 1, own].tolist()}

    for before, refused in (([], False), ([1], True)):
        tokens = changed_tokens(
            finished,
            shard,
            tmp_path / f"{refused}.parquet",
            lambda row, before=before: logprobs(row, before),
        )
        said = verified(finished, shard, tmp_path / f"out-{refused}", model=folder, tokens=tokens)
        assert ("answers: the two servers differ" in said) == refused, said


def test_another_models_head_is_refused(
    finished: Workspace, tmp_path: Path, demo_model: Path
) -> None:
    make_tiny_model(tmp_path / "other", demo_model, seed=1)
    shard = shard_of(finished, "two")
    said = verified(
        finished,
        shard,
        tmp_path / "out",
        model=tmp_path / "other",
        tokens=tokens_of(finished, shard),
    )
    assert "answers: the two servers differ" in said


def test_answers_without_tokens_are_not_verified(finished: Workspace, tmp_path: Path) -> None:
    shard = shard_of(finished, "one")
    said = verified(
        finished,
        shard,
        tmp_path,
        model=finished.folder / "models" / "tiny",
        tokens=tmp_path / "gone.parquet",
    )
    assert f"tokens of shard {shard['shard_id']} cannot be read" in said


def test_other_sampling_has_a_folder_of_its_own(finished: Workspace, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copy", copy_function=shutil.copy2)
    copy = Workspace(tmp_path / "copy", json.loads(json.dumps(finished.config)))
    chunks = Prompts.read(copy.results / "answers" / "two" / "prompts.json").chunks
    copy.config["data"]["sources"][1]["answers"]["sampling"]["temperature"] = 1.0
    planned = copy.run("--dry-run", "answers").output
    assert len(re.findall(r"^rule answer:$", planned, re.MULTILINE)) == len(chunks)
    copy.config["data"]["sources"][1]["answers"]["sampling"]["temperature"] = 0
    copy.config["data"]["sources"][1]["answers"]["skip_degenerate"] = True
    planned = copy.run("--dry-run").output
    assert "rule answer:" not in planned
    assert "rule tokenise:" in planned
