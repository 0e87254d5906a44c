"""Page and vocabulary of tokens alone: made without a server, and never stale."""

import subprocess
from pathlib import Path

import pytest
from changes import edit_row, touch_everything
from workspace import Run, Workspace, make_workspace, tiny_config

from draftstates.plan.words import of_bytes, of_seconds


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    """Make a workspace with the real commands: one that asked for a server would start it."""
    workspace = make_workspace(
        tmp_path_factory.mktemp("report") / "work", tiny_model, standins=False
    )
    workspace.config |= {"draft_vocab_size": 64, "extract": {"tokens_per_second": 2}}
    return workspace


def vocabularies(workspace: Workspace) -> list[str]:
    return sorted(path.name for path in (workspace.results / "vocabulary").iterdir())


def test_the_page_of_tokens_and_the_vocabulary_are_there_before_any_server_starts(
    workspace: Workspace,
) -> None:
    run = workspace.run("tokens_report")
    assert run.jobs("server") == run.extracted == run.jobs("report_page") == 0
    assert not (workspace.results / ".server").exists()
    page = (workspace.results / "report" / "tokens.html").read_text()
    totals = workspace.plan()["accounting"]["totals"]
    assert f"{totals['tokens']:,}</b><span>tokens" in page
    assert "to capture, at the configured rate" in page
    # the two sources, and their words as text of the page's samples
    assert "<td>one</td>" in page and "<td>two</td>" in page and '" river"' in page
    assert 'id="trust"' not in page
    (name,) = vocabularies(workspace)
    files = {path.name for path in (workspace.results / "vocabulary" / name).iterdir()}
    assert files - {".snakemake_timestamp"} == {
        "token_freq.pt",
        "d2t.npy",
        "t2d.npy",
        "vocab_mapping.pt",
        "vocabulary.json",
    }
    assert workspace.run("tokens_report").nothing_to_be_done


def test_the_report_shows_the_page_with_its_caption(workspace: Workspace) -> None:
    workspace.run("tokens_report")
    workspace.run("tokens_report", "--report", "report.html")
    page = (workspace.folder / "report.html").read_text()
    for part in (
        "tokens.html",
        "before anything is captured",
        "tokens, before the capture",
        "Every shard was read back from the disk",
    ):
        assert part in page, part


def test_a_vocabulary_follows_its_content_alone(workspace: Workspace) -> None:
    workspace.run("tokens_report")
    before = vocabularies(workspace)
    touch_everything(workspace)
    again = workspace.run("tokens_report", "--forcerun", "plan")
    assert (again.jobs("plan"), again.jobs("vocabulary")) == (1, 0)
    rows = workspace.rows()
    edit_row(workspace)
    assert workspace.run("tokens_report").jobs("vocabulary") == 1
    assert len(vocabularies(workspace)) == len(before) + 1
    workspace.write_rows(rows)
    assert workspace.run("tokens_report").jobs("vocabulary") == 0, "the rows of before"


def test_bytes_and_hours_are_on_the_screen_before_the_server_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_model, standins=True)
    workspace.config |= {"extract": {"tokens_per_second": 2}}
    run = workspace.run()
    plan = workspace.plan()
    line = f"{of_bytes(plan['bytes_needed'])} to write, 0 B written"
    assert run.output.count(line) == 1
    assert run.output.index(line) < run.output.index("rule server:")
    seconds = plan["accounting"]["totals"]["tokens"] / 2
    assert f"about {of_seconds(seconds)} at 2 tokens/s" in run.output
    assert run.output.rstrip().splitlines().count("report: results/report/index.html") == 1
    assert (run.jobs("report_page"), run.jobs("tokens_page")) == (1, 0)
    again = workspace.run()
    assert again.nothing_to_be_done and "to write" not in again.output


def test_a_terminal_shows_stages_and_the_log_shows_jobs(tmp_path: Path, tiny_model: Path) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_model, standins=True)
    start = workspace.prepare()
    del start["env"]["DRAFTSTATES_OUTPUT"]
    done = subprocess.run(**start, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    (log,) = (workspace.folder / ".snakemake" / "log").glob("*.snakemake.log")
    run, whole = Run(done.stdout), Run(log.read_text())
    shards = len(workspace.plan()["shards"])
    assert whole.extracted == whole.jobs("verify") == shards > 4
    assert run.extracted == run.jobs("verify") == run.jobs("manifest") == 0
    assert "Params have changed" not in run.output and "steps (" not in run.output
    for rule in ("plan", "server", "manifest", "report_page"):
        assert f"(Rule: {rule})" in run.output
    assert "to write, 0 B written" in run.output
    assert "report: results/report/index.html" in run.output
    assert len(run.output.splitlines()) < 80, run.output


def test_an_export_that_the_capture_does_not_allow_is_named_before_anything_is_made(
    tmp_path: Path, tiny_model: Path
) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_model, standins=True)
    workspace.config = {**tiny_config(), "exports": {"speculators": {}}}
    for flags in ((), ("--dry-run",)):
        failed = workspace.snakemake(*flags)
        assert failed.returncode != 0
        assert (
            "exports.speculators: pre_norm is asked for and the capture holds post_norm"
            in failed.stdout
        )
    assert not (workspace.results / "tokens").exists()
