"""A failed server job whose fault lasts: the run submits no second one. Slurm is made up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftstates.server.settings import ServerSettings
from draftstates.server.slurm import commands
from draftstates.server.slurm.folder import RunFolder, beat
from draftstates.server.slurm.job import leave_error
from draftstates.server.slurm.leases import Request
from draftstates.server.slurm.supervisor import Supervisor


class Queue:
    """A Slurm that runs every job until it is cancelled."""

    def __init__(self) -> None:
        self.submitted = 0
        self.jobs: dict[str, commands.QueueEntry] = {}
        self.entry = commands.QueueEntry("RUNNING", "None", None)

    def submit(self, *_: object, **__: object) -> str:
        self.submitted += 1
        self.jobs[str(self.submitted)] = self.entry
        return str(self.submitted)

    def cancel(self, jobs: Iterator[str]) -> bool:
        for job in list(jobs):
            self.jobs.pop(job, None)
        return True


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(commands, "submit", made.submit)
    monkeypatch.setattr(commands, "cancel", made.cancel)
    monkeypatch.setattr(commands, "queue", lambda name: dict(made.jobs))
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.make()
    beat(made.heartbeat)
    return made


def settings(**changes: object) -> ServerSettings:
    given = {"state": Path("state"), "log": Path("server.log"), "command": ["server"]}
    return ServerSettings(**{**given, "launcher": "slurm", **changes})


def ask(run: RunFolder, wanted: ServerSettings) -> Request:
    return Request(run.leases, wanted, client="a test")


def fail_all(run: RunFolder, *, lasting: bool) -> None:
    for place in (run.folder / "servers").iterdir():
        leave_error(run, run.server(place.name), "it refuses the model", lasting=lasting)


def error_of(request: Request) -> str:
    answer = request.answer()
    assert answer
    return answer["error"]


@pytest.mark.parametrize("lasting", [True, False])
def test_after_a_lasting_failure_no_second_job_is_submitted(
    run: RunFolder, queue: Queue, tmp_path: Path, lasting: bool
) -> None:
    wanted = settings(log=tmp_path / "server.log")
    supervisor = Supervisor(run)
    first = ask(run, wanted)
    supervisor.tick()
    assert queue.submitted == 1
    fail_all(run, lasting=lasting)
    supervisor.tick()
    assert "it refuses the model" in error_of(first)
    assert ("no second attempt is made" in error_of(first)) == lasting
    assert queue.jobs == {}
    second = ask(run, wanted)
    supervisor.tick()
    if lasting:
        assert error_of(second) == error_of(first)
        assert queue.submitted == 1
        # a server with other settings may start
        ask(run, settings(log=tmp_path / "server.log", command=["another"]))
        supervisor.tick()
    assert queue.submitted == 2


def test_a_job_that_slurm_will_never_start_is_submitted_once(
    run: RunFolder, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstates.server.slurm.servers._HOPELESS_SECONDS", 0.0)
    queue.entry = commands.QueueEntry("PENDING", "PartitionTimeLimit", None)
    wanted = settings(log=tmp_path / "server.log", slurm={"poll_seconds": 1.0})
    supervisor = Supervisor(run)
    requests = [ask(run, wanted)]
    for _ in range(3):
        supervisor.tick()
        # a look at the queue is not due yet
        supervisor._servers._next_look = 0.0
    requests.append(ask(run, wanted))
    supervisor.tick()
    errors = {error_of(request) for request in requests}
    assert len(errors) == 1
    assert "cannot start: PartitionTimeLimit" in errors.pop()
    assert queue.submitted == 1
