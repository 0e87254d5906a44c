"""What clients and server jobs of a cluster agree by, without a cluster."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstates.errors import UserError
from draftstates.files import write_private
from draftstates.server import run as run_module
from draftstates.server.folder import (
    Pulse,
    RunFolder,
    beat,
    leave_error,
    overwrite,
    read_overwritten,
)
from draftstates.server.lease import _wait
from draftstates.server.leases import Request
from draftstates.server.processes import Process
from draftstates.server.run import present_run, start_run
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.commands import seconds
from draftstates.server.slurm.network import own_address

ELSEWHERE = Process(pid=1, started=1, machine="another")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:59", 59),
        ("1:00:00", 3600),
        ("2-03:04:05", 183845),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
    ],
)
def test_times_are_read_as_slurm_writes_them(text: str, expected: float | None) -> None:
    assert seconds(text) == expected


def test_a_pulse_is_heard_by_change_not_by_clock(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    pulse = Pulse(ELSEWHERE, path)
    assert not pulse.has_stopped(0.5), "the first beat may be still to come"
    beat(path)
    assert pulse.silence() < 0.1
    time.sleep(0.2)
    assert 0.2 <= pulse.silence() < 0.5
    assert pulse.has_stopped(0.1) and not pulse.has_stopped(0.5)
    beat(path)
    assert pulse.silence() < 0.1
    path.unlink()
    assert pulse.silence() == float("inf")


def test_a_process_with_the_numbers_of_a_container_is_of_this_machine() -> None:
    here = Process.current()
    contained = dataclasses.replace(here, machine=here.machine.split()[0] + " pid:[1]")
    assert contained.reaches_loopback and not contained.is_here
    assert not ELSEWHERE.reaches_loopback and not ELSEWHERE.is_here


def test_a_process_of_this_machine_lives_by_its_number_whatever_its_heartbeat(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen(["sleep", "60"])
    pulse = Pulse(Process.of(child.pid), tmp_path / "heartbeat")
    assert not pulse.has_stopped(0.0)
    child.kill()
    child.wait()
    assert pulse.has_stopped(600.0)


def test_an_answer_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    path.write_text("")
    assert read_overwritten(path) is None
    path.write_text('{"url": "http')
    assert read_overwritten(path) is None
    overwrite(path, {"url": "http://a"})
    assert read_overwritten(path) == {"url": "http://a"}
    # a full disk has cut off a longer one
    path.write_text(json.dumps({"error": "x" * 100})[:-1])
    overwrite(path, {"error": "y"})
    assert read_overwritten(path) == {"error": "y"}
    path.unlink()
    with pytest.raises(FileNotFoundError):
        overwrite(path, {})
    assert not path.exists()


def test_a_supervisor_that_cannot_run_is_replaced_three_times_and_then_the_waiting_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTATES_RUN_FOLDER", "")
    # stands in for a Python that cannot import the package
    monkeypatch.setattr(sys, "executable", "/bin/false")
    run = start_run(tmp_path)
    settings = ServerSettings(state=tmp_path, log=tmp_path / "log", command=["server"])
    request = Request(run.leases, settings)
    answer = answer_of(request)
    assert "the server's supervisor ended 3 times" in answer["error"]
    shutil.rmtree(run.folder)


def answer_of(request: Request) -> dict[str, str]:
    """Wait for the answer to a lease."""
    deadline = time.monotonic() + 20
    while not (answer := request.answer()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def test_a_supervisor_whose_log_cannot_be_opened_is_the_error_of_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTATES_RUN_FOLDER", "")
    (tmp_path / "supervisor.log").mkdir()
    run = start_run(tmp_path)
    settings = ServerSettings(state=tmp_path, log=tmp_path / "log", command=["server"])
    answer = answer_of(Request(run.leases, settings))
    assert "Is a directory" in answer["error"] and "supervisor.log" in answer["error"]
    shutil.rmtree(run.folder)


def test_the_waiting_are_told_although_a_file_server_was_away_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTATES_RUN_FOLDER", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    stale = ["stat", "find", "tell"]
    stat, find, tell = Path.stat, run_module.waiting_stems, run_module.overwrite

    def once(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if name in stale and threading.current_thread().name == "supervise":
                stale.remove(name)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return call(*args, **options)

        return called

    monkeypatch.setattr(Path, "stat", once("stat", stat))
    monkeypatch.setattr(run_module, "waiting_stems", once("find", find))
    monkeypatch.setattr(run_module, "overwrite", once("tell", tell))
    run = start_run(tmp_path)
    settings = ServerSettings(state=tmp_path, log=tmp_path / "log", command=["server"])
    answer = answer_of(Request(run.leases, settings))
    assert "the server's supervisor ended 3 times" in answer["error"]
    assert not stale
    shutil.rmtree(run.folder)


def test_a_server_is_bound_to_an_address_of_the_right_network() -> None:
    assert own_address(interface="lo", peer="anyone") == "127.0.0.1"
    with pytest.raises(
        UserError, match="localhost for itself .127.0.0.1.; set server.slurm.interface"
    ):
        own_address(interface=None, peer="localhost")
    with pytest.raises(UserError, match="does not reach no.such.host.invalid"):
        own_address(interface=None, peer="no.such.host.invalid")


def test_a_run_that_is_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run-1")
    monkeypatch.setenv("DRAFTSTATES_RUN_FOLDER", str(run.folder))
    with pytest.raises(UserError, match="is over .*run-1"):
        present_run()
    current = Process.current()
    run.make(dataclasses.replace(current, started=current.started - 1))
    with pytest.raises(UserError, match="is over .*run-1"):
        present_run()
    write_private(run.owner, {**dataclasses.asdict(ELSEWHERE), "host": "login"})
    assert present_run(), "another machine's process is not looked for here"
    monkeypatch.delenv("DRAFTSTATES_RUN_FOLDER")
    assert present_run() is None


def test_a_client_waits_on_while_a_file_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    run.make(Process.current())
    settings = ServerSettings(state=tmp_path, log=tmp_path / "log", command=["server"])
    request = Request(run.leases, settings)
    looks = []

    def away(self: Path, *_: object, **__: object) -> str:
        looks.append(self)
        if len(looks) > 4:
            monkeypatch.undo()
            overwrite(request._path(".grant"), {"error": "refused"})
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))

    monkeypatch.setattr("draftstates.server.lease._STATUS_SECONDS", 0.0)
    for name in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, away)
    with pytest.raises(UserError, match="refused"):
        _wait(request, run)
    assert len(looks) > 4
    request.give_back()
    with pytest.raises(UserError, match="the run is over, and its folder .*run is gone"):
        _wait(request, run)


@pytest.mark.parametrize("ending", [False, True])
def test_a_server_leaves_its_error_except_in_a_run_that_ends_which_removes_its_folder(
    tmp_path: Path, ending: bool
) -> None:
    run = RunFolder(tmp_path / "run")
    run.make(Process.current())
    place = run.server("one")
    place.folder.mkdir()
    if ending:
        run.owner.unlink()
    leave_error(run, place, "told to end")
    assert place.failed.exists() != ending
