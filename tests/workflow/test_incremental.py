"""Promise 8: a rerun captures what is stale and nothing else.

The tests count the extracting jobs that Snakemake starts, in runs of the whole workflow as it is.
One real server serves all runs that can share it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from changes import NO_CHANGES, append_rows, edit_row, remove_row, replace_weights
from server_harness import Running
from workspace import Workspace, make_workspace, tiny_config


def real_config(server: Running) -> dict:
    """Return a configuration whose results folder is the one that the server writes to."""
    external = {"launcher": "external", "url": server.endpoint.url}
    return {**tiny_config(), "results": str(server.endpoint.root), "server": external}


@pytest.fixture(scope="module")
def really_finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, real_server: Running
) -> Path:
    """Make a workspace whose first run with the real server is over, and its results.

    Tests use copies.
    """
    folder = tmp_path_factory.mktemp("really-finished")
    workspace = make_workspace(folder / "work", tiny_model, standins=False)
    # The page costs 9 seconds in each of many runs; the demo on Slurm makes it.
    workspace.stand_in("report_page")
    workspace.config = real_config(real_server)
    first = workspace.run()
    planned = workspace.plan()["shards"]
    assert first.extracted == len(workspace.shards()) == len(planned) >= 6
    manifest = json.loads(
        (workspace.results / workspace.plan()["capture_folder"] / "manifest.json").read_text()
    )
    assert {shard["shard_id"] for shard in manifest["shards"]} == {
        shard["shard_id"] for shard in planned
    }
    shutil.copytree(workspace.results, folder / "results", copy_function=shutil.copy2)
    return folder


@pytest.fixture
def real(really_finished: Path, real_server: Running, tmp_path: Path) -> Workspace:
    """Copy the really finished workspace to another path.

    The results lie where the server writes, as the first run left them.
    """
    for entry in real_server.endpoint.root.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(
        really_finished / "results",
        real_server.endpoint.root,
        copy_function=shutil.copy2,
        dirs_exist_ok=True,
    )
    shutil.copytree(really_finished / "work", tmp_path / "copy", copy_function=shutil.copy2)
    return Workspace(tmp_path / "copy", real_config(real_server))


def test_right_after_the_first_run_nothing_is_to_be_done(real: Workspace) -> None:
    again = real.run()
    assert again.nothing_to_be_done
    assert again.extracted == 0


def planned_shards(workspace: Workspace) -> list[str]:
    """Return the planned shards of the source `one`, in its order."""
    return [shard["shard_id"] for shard in workspace.plan()["shards"] if shard["source"] == "one"]


def sample_lengths(workspace: Workspace) -> dict[str, int]:
    """Return the tokens of each sample of the source `one`, by sample id."""
    table = pq.read_table(
        workspace.results / "tokens" / "one.parquet", columns=["sample_id", "input_ids"]
    )
    return {
        name: len(ids)
        for name, ids in zip(table["sample_id"].to_pylist(), table["input_ids"], strict=True)
    }


def captured_tokens(workspace: Workspace, shard_ids: set[str]) -> int:
    """Return the tokens of these shards that the server computed, without prefix recaptures."""
    logs = workspace.results / "logs" / workspace.plan()["capture_folder"] / "extract"
    return sum(
        json.loads((logs / f"{name}.log").read_text().splitlines()[-1])["captured_tokens"]
        for name in shard_ids
    )


def test_changed_rows_capture_their_own_shards_and_undoing_it_all_is_free(real: Workspace) -> None:
    """The changes come one after the other, and each is counted by itself.

    Of a stale shard only the samples that no earlier shard holds are computed. More kinds of
    changes: `tests/unit/plan/test_boundaries.py`.
    """
    rows = real.rows()
    first = before = planned_shards(real)
    seen = sample_lengths(real)
    for change in (edit_row, remove_row):
        change(real)
        extracted, after, lengths = real.run().extracted, planned_shards(real), sample_lengths(real)
        assert 1 <= extracted <= 2, f"{change.__name__}: {extracted} captured"
        assert extracted == len(set(after) - set(before)), change.__name__
        new = sum(length for name, length in lengths.items() if name not in seen)
        assert captured_tokens(real, set(after) - set(before)) == new, change.__name__
        assert (new == 0) == (change is remove_row)
        before, seen = after, {**seen, **lengths}
    append_rows(real)
    extracted, after = real.run().extracted, planned_shards(real)
    assert after[: len(before) - 1] == before[:-1], "rows appended move a shard before the last"
    assert extracted == len(set(after) - set(before)) >= 1, "rows appended"
    real.write_rows(rows)
    assert real.run().extracted == 0, "everything undone"
    assert planned_shards(real) == first
    planned = {shard["shard_id"] for shard in real.plan()["shards"]}
    assert {shard.stem for shard in real.shards()} > planned
    prune = [
        sys.executable,
        "-m",
        "draftstates.commands.cli",
        "prune",
        "--results",
        str(real.results),
        "--delete",
    ]
    subprocess.run(
        prune, cwd=real.folder, env={**os.environ, "PYTHONPATH": str(real.folder)}, check=True
    )
    assert {shard.stem for shard in real.shards()} == planned, (
        "the stale shards are gone and no other"
    )
    assert real.run().nothing_to_be_done


def test_what_does_not_decide_the_numbers_captures_nothing(real: Workspace) -> None:
    """Two runs cover all changes; the workspace is not at the path of its first run."""
    before = real.shards()
    half = len(NO_CHANGES) // 2
    for changes in (NO_CHANGES[:half], NO_CHANGES[half:]):
        for change in changes:
            change(real)
        run = real.run()
        names = [change.__name__ for change in changes]
        assert (run.extracted, run.jobs("server")) == (0, 0), names
    assert real.shards() == before


def test_configured_exports_are_part_of_a_run_and_made_once(real: Workspace) -> None:
    real.config |= {
        "exports": {"specforge": {}, "deepspec": {"dtype": "bfloat16"}},
        "draft_vocab_size": 64,
    }
    run = real.run()
    assert (run.jobs("export"), run.extracted, run.jobs("server")) == (2, 0, 0)
    folder = real.results / real.plan()["capture_folder"] / "exports"
    for trainer in ("specforge", "deepspec"):
        summary = json.loads((folder / trainer / "export.json").read_text())
        assert summary["samples"] == sum(shard["samples"] for shard in real.plan()["shards"])
    assert (folder / "specforge" / "vocab_mapping.pt").exists()
    assert real.run().nothing_to_be_done
    real.config["draft_vocab_size"] = 32
    assert real.run().jobs("export") == 1, (
        "of the two, specforge alone has a vocabulary of this size"
    )


def test_one_shard_deleted_is_one_capture(real: Workspace) -> None:
    shards = real.shards()
    shards[2].unlink()
    for name, seconds in (("_LOOK_SECONDS", "2.0"), ("_SAY_SECONDS", "60.0")):
        real.edit("draftstates/report/terminal.py", f"{name} = {seconds}", f"{name} = 0.05")
    run = real.run()
    assert (run.extracted, run.jobs("server")) == (1, 0)
    assert re.search(r"capture: [\d,]+ of [\d,]+ tokens", run.output), "the run says how far it is"
    assert real.shards() == shards


def test_a_server_that_has_the_first_weights_is_refused_once_others_are_in_their_place(
    real: Workspace, demo_model: Path
) -> None:
    """`test_graph.py` shows that other weights capture everything."""
    replace_weights(real, demo_model)
    refused = real.snakemake()
    assert refused.returncode != 0
    assert "the server failed its self-test" in refused.stdout
    assert "laid out for capture key" in refused.stdout
