"""Slurm's commands and queue, where a controller or this machine is in trouble."""

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftstates.errors import LastingError, UserError
from draftstates.server import supervisor
from draftstates.server.address import write_key_config
from draftstates.server.folder import RunFolder
from draftstates.server.lasting import Failure
from draftstates.server.leases import Request
from draftstates.server.processes import Process
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm import commands, job
from draftstates.server.slurm.server import Queue


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.make(Process.current())
    return made


def slurm_settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(
        launcher="slurm", state=tmp_path, log=tmp_path / "server.log", command=["server"]
    )


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
    monkeypatch.setattr(supervisor, "ignore", lambda *_: None)
    beats = set()

    def slow(_: object) -> None:
        for _ in range(10):
            time.sleep(0.05)
            beats.add(run.heartbeat.read_text())

    monkeypatch.setattr(supervisor.Supervisor, "tick", slow)
    supervisor.serve(run, Process.current())
    assert len(beats) > 2
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_the_queue_is_that_of_this_user_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def answer(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        asked.extend(command)
        return subprocess.CompletedProcess(command, 0, "7|RUNNING|None|UNLIMITED\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setenv("LOGNAME", "somebody-else")
    assert commands.queue("name") == {"7": commands.QueueEntry("RUNNING", "None", None)}
    assert asked[asked.index("--user") + 1] == str(os.getuid())


class Away:
    """A file server that does not answer for the first looks at a path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.looks, self._path, self._stat = 0, path, Path.stat
        monkeypatch.setattr(Path, "stat", lambda path, **options: self.look(path, **options))

    def look(self, path: Path, **options: Any) -> os.stat_result:
        if path == self._path:
            self.looks += 1
            if self.looks < 3:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return self._stat(path, **options)


def test_a_supervisor_goes_on_after_a_file_server_was_away(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "end_descendants", lambda grace: None)
    monkeypatch.setattr(supervisor, "ignore", lambda *_: None)
    away = Away(monkeypatch, run.folder)
    ticks: list[int] = []
    monkeypatch.setattr(supervisor.Supervisor, "tick", lambda self: ticks.append(away.looks))
    monkeypatch.setattr(supervisor.Supervisor, "is_needed", property(lambda _: len(ticks) < 4))
    supervisor.serve(run, Process.current())
    assert ticks == [1, 2, 3, 4]


def test_a_server_job_goes_on_after_a_file_server_was_away(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = run.server("one")
    place.folder.mkdir()
    write_key_config(run.key_config, "key")
    found: list[OSError | Failure] = [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        Failure("it ended"),
    ]

    def failure(_: object) -> Failure:
        if isinstance(next_one := found.pop(0), OSError):
            raise next_one
        return next_one

    monkeypatch.setattr(job, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(job, "own_address", lambda **_: "127.0.0.1")
    monkeypatch.setattr(job, "LocalServer", lambda *_, **__: SimpleNamespace(url="", log=""))
    monkeypatch.setattr(job.Replica, "failure", failure)
    away = Away(monkeypatch, place.stop)
    ended = job.serve(run, slurm_settings(tmp_path), place=place, number=0)
    assert ended == Failure("it ended")
    assert away.looks == 3


@pytest.fixture(params=[errno.EAGAIN, errno.ENOENT])
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Have no process start; yield the number of the error."""

    def refuse(command: list[str], **_: object) -> None:
        raise OSError(request.param, os.strerror(request.param), command[0])

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", refuse)
        yield request.param


def test_a_command_of_slurm_that_cannot_be_started_is_no_answer(
    refused: int, tmp_path: Path
) -> None:
    assert commands.queue("name") is None
    assert commands.cancel(["1"]) is False
    with pytest.raises(UserError, match="sbatch cannot be started") as raised:
        commands.submit([], name="name", log=tmp_path / "log", command=["true"])
    assert isinstance(raised.value, LastingError) == (refused == errno.ENOENT)


def test_a_machine_without_slurm_is_the_error_of_the_lease(
    run: RunFolder, tmp_path: Path, refused: int
) -> None:
    request = Request(run.leases, slurm_settings(tmp_path))
    supervisor.Supervisor(run, Process.current()).tick()
    assert "sbatch cannot be started" in (request.answer() or {})["error"]
