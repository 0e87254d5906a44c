"""Set-up of all tests: the path of shared modules, and the tests that may run at the same time."""

import collections
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lease_harness import MARK, Playground

from draftstates.server.run import RUN_FOLDER_VARIABLE

REPOSITORY = Path(__file__).parent.parent

# A suite that a shell started in its background ignores INT. The processes that the tests start and
# interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A suite that nohup started ignores HUP. With a handler, HUP has no effect on the suite and ends
# the processes that the suite starts.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Tests read in a run's output which jobs ran. Without this, only the run's log says it.
os.environ["DRAFTSTATES_OUTPUT"] = "full"

# The longest first, so that all workers end at about the same time. One group runs in one worker:
# its tests share a server, the one Slurm, or the images. Tests with containers come after those on
# Slurm: one of them uses both.
GROUPS = {
    "cluster": "slurm",
    "containers": "slurm",
    "workflow/test_incremental.py": "incremental",
    "workflow/test_kills.py": "kills",
    "workflow/test_kill_campaign.py": "kill campaign",
    "workflow/test_answering_runs.py": "answers",
    "server/test_parallel.py": "server-shapes",
    "server/test_families.py": "families",
    "server": "server",
    "workflow/test_graph.py": "graph",
    "workflow/test_anywhere.py": "anywhere",
    "workflow/test_failed_jobs.py": "failed jobs",
    "workflow/test_damage.py": "preloaded",
    "workflow/test_hostile_folders.py": "preloaded",
}


def group_of(path: Path) -> tuple[int, str]:
    """Return the place in the order, and the group, of a test file; by default its own group."""
    name = path.relative_to(REPOSITORY / "tests").as_posix()
    for place, (prefix, group) in enumerate(GROUPS.items()):
        if name == prefix or name.startswith(f"{prefix}/"):
            return place, group
    return len(GROUPS) + name.startswith("unit/"), name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the groups if several workers run them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: group_of(item.path)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each group to one worker, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.split("::")[0])[1]

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: the summary comes half an hour later."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        last = report.longreprtext.strip().splitlines()[-1:]
        print(f"\n{report.nodeid} failed in its {report.when}: {''.join(last)}", flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seconds that each folder's tests took: the table of README.md has them."""
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    if seconds:
        terminalreporter.section("seconds by folder")
        for folder, spent in seconds.most_common():
            terminalreporter.line(f"{spent:8.0f}  {folder}")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the demo's model, SmolLM2-135M-Instruct; make it first if it is missing."""
    folder = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        subprocess.run(
            [sys.executable, REPOSITORY / "scripts" / "prepare_demo_model.py", "--output", folder],
            check=True,
        )
    return folder


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    """Yield a folder to try leased servers in; end every process that was started for it."""
    playground = Playground(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", playground.environment()["PYTHONPATH"])
    # a lease sets it; no later test belongs to this run
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, "")
    yield playground
    playground.end()
