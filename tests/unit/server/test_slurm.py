"""Slurm's commands and queue, where a controller or this machine is in trouble."""

import threading
import time
from pathlib import Path

import pytest

from draftstates.server import supervisor
from draftstates.server.folder import RunFolder
from draftstates.server.processes import Process
from draftstates.server.slurm import commands
from draftstates.server.slurm.server import Queue


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.make(Process.current())
    return made


def test_a_controller_that_answers_late_is_asked_once_for_all_replicas(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def silent(name: str) -> None:
        asked.append(name)
        time.sleep(0.3)

    monkeypatch.setattr(commands, "queue", silent)
    queue = Queue(run)
    for _ in range(4):
        queue.look(every=0.2)
    assert len(asked) == 1


def test_the_supervisor_beats_while_slurm_does_not_answer(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "end_descendants", lambda grace: None)
    beats = set()

    def slow(_: object) -> None:
        for _ in range(10):
            time.sleep(0.05)
            beats.add(run.heartbeat.read_text())

    monkeypatch.setattr(supervisor.Supervisor, "tick", slow)
    supervisor.serve(run, Process.current())
    assert len(beats) > 2
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]
