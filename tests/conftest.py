"""Puts tests/ on the path: what several test folders share lies beside this file."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lease_harness import MARK, Playground

from draftstates.server.processes import OWNER_VARIABLE
from draftstates.server.slurm.folder import RUN_FOLDER_VARIABLE

REPOSITORY = Path(__file__).parent.parent

# a suite that a shell started in its background ignores INT, and so would everything that the tests start and then interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
# and one that nohup started ignores HUP: now the suite hears it without an effect, and what it starts ends by it
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's model, SmolLM2-135M-Instruct, made first if it is not there."""
    folder = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, REPOSITORY / "scripts" / "prepare_demo_model.py", "--output", folder], check=True)
    return folder


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    """A folder to try leased servers in; whatever was started for it is ended afterwards."""
    playground = Playground(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", playground.environment()["PYTHONPATH"])
    for name in (OWNER_VARIABLE, RUN_FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield playground
    playground.end()
