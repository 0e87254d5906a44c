"""Reports from tokens alone: made without a server, part of a run's report, and never stale."""

import json
from pathlib import Path

import pytest
from changes import edit_row, touch_everything
from workspace import Workspace, make_workspace, tiny_config


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


def test_statistics_samples_and_vocabulary_are_there_before_any_server_starts(
    workspace: Workspace,
) -> None:
    run = workspace.run("tokens_report")
    assert run.jobs("server") == run.extracted == 0
    assert not (workspace.results / ".server").exists()
    found = json.loads((workspace.results / "report" / "statistics.json").read_text())
    assert set(found["sources"]) == {"one", "two"}
    assert found["hours"] == pytest.approx(found["tokens"] / 7200)
    assert found["bytes_needed"] == workspace.plan()["bytes_needed"] > 0
    assert (workspace.results / "report" / "samples.html").read_text().count(
        '<div class="sample">'
    ) == 8
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


def test_the_report_shows_them_with_their_captions(workspace: Workspace) -> None:
    workspace.run("tokens_report")
    workspace.run("tokens_report", "--report", "report.html")
    page = (workspace.folder / "report.html").read_text()
    for part in (
        "statistics.html",
        "samples.html",
        "Tokens on a green ground are",
        "before anything is captured",
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
    line = f"{plan['bytes_needed']:,} bytes to write, 0 written"
    assert run.output.count(line) == 1
    assert run.output.index(line) < run.output.index("rule server:")
    assert (
        f"about {plan['accounting']['totals']['tokens'] / 7200:,.2f} hours at 2 tokens/s"
        in run.output
    )
    assert run.jobs("token_statistics") == run.jobs("sample_pages") == 1
    again = workspace.run()
    assert again.nothing_to_be_done and "bytes to write" not in again.output


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
