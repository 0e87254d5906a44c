"""The supervisor's decisions about server jobs. Slurm is made up."""

import dataclasses
import errno
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftstates.errors import UserError
from draftstates.files import write_private
from draftstates.server.address import Address
from draftstates.server.folder import RunFolder, ServerFolder, leave_error
from draftstates.server.gpus import GpuLock
from draftstates.server.lasting import Failure
from draftstates.server.lease import _until_silent, hold
from draftstates.server.leases import Request
from draftstates.server.local import LocalServer
from draftstates.server.processes import Process
from draftstates.server.replica import Replica
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm import commands
from draftstates.server.supervisor import Supervisor

SUBMIT = commands.submit


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


class Engine:
    """A local server that runs until `dead` says how it ended."""

    def __init__(self, number: int) -> None:
        self.url, self.dead = f"http://127.0.0.1:{9 + number}", ""

    def failure(self, *, ready: bool) -> Failure | None:
        return Failure(self.dead) if self.dead else None

    def end(self) -> None: ...

    def is_gone(self) -> bool:
        return True

    def last_lines(self) -> str:
        return ""


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
    made.make(Process.current())
    return made


def settings(tmp_path: Path, **changes: Any) -> ServerSettings:
    given = {
        "state": Path("state"),
        "log": tmp_path / "server.log",
        "command": ["server"],
        "slurm": {"poll_seconds": 1.0},
    }
    return ServerSettings(**{**given, "launcher": "slurm", **changes})


def local_settings(tmp_path: Path, **changes: Any) -> ServerSettings:
    return settings(tmp_path, launcher="local", **{"state": tmp_path, **changes})


def raise_no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def start(run: RunFolder) -> Supervisor:
    return Supervisor(run, Process.current())


def tick(supervisor: Supervisor) -> None:
    # a look at the queue is not due yet
    supervisor._queue._next_look = 0.0
    supervisor.tick()


def present(run: RunFolder) -> list[ServerFolder]:
    """Return the folders of the servers that were started and not ended."""
    places = [run.server(folder.name) for folder in run.servers.iterdir()]
    return [place for place in places if not place.stop.exists()]


def fail_all(run: RunFolder, *, lasting: bool) -> None:
    for place in present(run):
        leave_error(run, place, "it refuses the model", lasting=lasting)


def ready(run: RunFolder) -> str:
    """Announce the one present server as its job does; return its generation."""
    (place,) = present(run)
    write_private(place.address, {"url": "http://node:1", "start_seconds": 1.0})
    return place.folder.name


def error_of(request: Request) -> str:
    answer = request.answer()
    assert answer
    return answer["error"]


@pytest.mark.parametrize("lasting", [True, False])
def test_after_a_lasting_failure_no_second_job_is_submitted(
    run: RunFolder, queue: Queue, tmp_path: Path, lasting: bool
) -> None:
    wanted = settings(tmp_path)
    supervisor = start(run)
    first = Request(run.leases, wanted)
    tick(supervisor)
    assert queue.submitted == 1
    fail_all(run, lasting=lasting)
    tick(supervisor)
    assert "it refuses the model" in error_of(first)
    assert ("no second attempt is made" in error_of(first)) == lasting
    assert queue.jobs == {}
    tick(supervisor)
    second = Request(run.leases, wanted)
    tick(supervisor)
    if lasting:
        assert error_of(second) == error_of(first)
        assert queue.submitted == 1
        # a server with other settings may start
        Request(run.leases, settings(tmp_path, command=["another"]))
        tick(supervisor)
    assert queue.submitted == 2


def test_a_lease_that_waits_while_a_server_dies_that_has_served_gets_the_next_one(
    run: RunFolder, queue: Queue, tmp_path: Path
) -> None:
    supervisor = start(run)
    user = Request(run.leases, settings(tmp_path))
    tick(supervisor)
    ready(run)
    tick(supervisor)
    assert user.answer()
    fail_all(run, lasting=False)
    waiting = Request(run.leases, settings(tmp_path))
    tick(supervisor)
    assert waiting.answer() is None
    tick(supervisor)
    ready(run)
    tick(supervisor)
    assert (waiting.answer() or {})["url"] == "http://node:1"
    assert queue.submitted == 2


def test_a_job_that_slurm_will_never_start_is_submitted_once(
    run: RunFolder, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstates.server.slurm.server._HOPELESS_SECONDS", 0.0)
    queue.entry = commands.QueueEntry("PENDING", "PartitionTimeLimit", None)
    supervisor = start(run)
    requests = [Request(run.leases, settings(tmp_path))]
    for _ in range(3):
        tick(supervisor)
    requests.append(Request(run.leases, settings(tmp_path)))
    tick(supervisor)
    errors = {error_of(request) for request in requests}
    assert len(errors) == 1
    assert "cannot start: PartitionTimeLimit" in errors.pop()
    assert queue.submitted == 1


@pytest.mark.parametrize(
    ("words", "lasting"),
    [
        ("sbatch: error: invalid partition specified: nowhere", True),
        ("Batch job submission failed: Unable to contact slurm controller", False),
        ("no answer within 60 s", False),
        ("Job violates accounting/QOS policy (job submit limit, user's size)", False),
    ],
)
def test_a_job_that_slurm_refuses_is_submitted_once_unless_it_may_be_accepted_later(
    run: RunFolder,
    queue: Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    lasting: bool,
) -> None:
    asked = []
    monkeypatch.setattr(commands, "submit", SUBMIT)
    monkeypatch.setattr(
        commands,
        "_run",
        lambda command, text="": (
            asked.append(command) or subprocess.CompletedProcess(command, 1, "", words)
        ),
    )
    supervisor = start(run)
    for attempts in (1, 2):
        request = Request(run.leases, settings(tmp_path))
        tick(supervisor)
        assert words in error_of(request)
        assert ("no second attempt is made" in error_of(request)) == lasting
        assert len(asked) == (1 if lasting else attempts)
        request.give_back()


def test_one_kind_of_server_at_a_time_and_the_other_is_ended_first(
    run: RunFolder, queue: Queue, tmp_path: Path
) -> None:
    supervisor = start(run)
    captures, answers = settings(tmp_path), settings(tmp_path, kind="generate")
    first = Request(run.leases, captures)
    tick(supervisor)
    generation = ready(run)
    tick(supervisor)
    assert (first.answer() or {})["generation"] == generation
    second = Request(run.leases, answers)
    third = Request(run.leases, captures)
    tick(supervisor)
    assert third.answer(), "the present server serves as long as it is asked for"
    assert second.answer() is None
    first.give_back()
    tick(supervisor)
    assert list(queue.jobs) == ["1"]
    third.give_back()
    tick(supervisor)
    tick(supervisor)
    assert list(queue.jobs) == ["2"]
    asked = json.loads(present(run)[0].settings.read_text())
    assert asked["kind"] == "generate"
    ready(run)
    tick(supervisor)
    assert (second.answer() or {})["url"] == "http://node:1"


def test_other_settings_of_the_same_kind_are_refused_while_a_server_is_in_use(
    run: RunFolder, queue: Queue, tmp_path: Path
) -> None:
    supervisor = start(run)
    first = Request(run.leases, settings(tmp_path))
    tick(supervisor)
    ready(run)
    tick(supervisor)
    assert first.answer()
    other = Request(run.leases, settings(tmp_path, command=["another"]))
    tick(supervisor)
    assert "a server with other settings runs there" in error_of(other)
    assert queue.submitted == 1


def test_another_kind_is_refused_while_a_person_keeps_a_server_up(
    run: RunFolder, queue: Queue, tmp_path: Path
) -> None:
    supervisor = start(run)
    kept = Request(run.leases, settings(tmp_path), kept=True)
    tick(supervisor)
    ready(run)
    tick(supervisor)
    assert kept.answer()
    other = Request(run.leases, settings(tmp_path, kind="generate"))
    same = Request(run.leases, settings(tmp_path))
    tick(supervisor)
    assert "`draftstates serve` keeps up" in error_of(other)
    assert (same.answer() or {})["url"] == "http://node:1"
    kept.give_back()
    later = Request(run.leases, settings(tmp_path, kind="generate"))
    tick(supervisor)
    assert later.answer() is None, "it waits for the lease that a step holds"
    same.give_back()
    for _ in range(3):
        tick(supervisor)
    assert queue.submitted == 2


def test_a_server_that_a_person_keeps_up_is_asked_for_as_such(
    run: RunFolder, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstates.server.lease.present_run", lambda: run)
    monkeypatch.setattr("draftstates.server.lease._wait", lambda *_: pytest.fail("asked"))
    found = []
    monkeypatch.setattr(
        "draftstates.server.lease.Request.give_back",
        lambda _: found.append(json.loads(next(run.leases.glob("*.json")).read_text())),
    )
    with pytest.raises(pytest.fail.Exception, match="asked"):
        hold(settings(tmp_path))
    assert found[0]["kept"] is True


@pytest.mark.parametrize(
    "damage",
    [
        lambda asked: "{",
        lambda asked: "[]",
        lambda asked: json.dumps({**asked, "settings": {**asked["settings"], "unknown": 1}}),
        lambda asked: json.dumps({**asked, "process": {"pid": 1}}),
        lambda asked: json.dumps({"client": "an earlier draftstates"}),
    ],
)
def test_a_request_that_cannot_be_understood_is_refused_alone(
    run: RunFolder, queue: Queue, tmp_path: Path, damage: Callable[[dict[str, Any]], str]
) -> None:
    damaged = Request(run.leases, settings(tmp_path))
    (path,) = run.leases.glob("*.json")
    path.write_text(damage(json.loads(path.read_text())))
    well = Request(run.leases, settings(tmp_path))
    supervisor = start(run)
    tick(supervisor)
    ready(run)
    tick(supervisor)
    assert "does not understand this request" in error_of(damaged)
    assert path.name in error_of(damaged)
    assert (well.answer() or {})["url"] == "http://node:1"
    damaged.give_back()
    tick(supervisor)


def test_a_supervisor_that_replaces_a_killed_one_ends_what_that_has_left_and_serves_who_waits(
    run: RunFolder, queue: Queue, tmp_path: Path
) -> None:
    killed = start(run)
    served = Request(run.leases, settings(tmp_path))
    tick(killed)
    generation = ready(run)
    tick(killed)
    assert served.answer()
    waiting = Request(run.leases, settings(tmp_path))
    supervisor = start(run)
    left = run.server(generation)
    assert left.stop.exists() and not left.address.exists()
    assert "its supervisor was killed" in left.failed.read_text(), "its client reads why"
    tick(supervisor)
    assert list(queue.jobs) == ["2"], "the job that was left is cancelled"
    ready(run)
    tick(supervisor)
    assert (waiting.answer() or {})["generation"] != generation


def test_a_step_of_another_machine_gets_no_server_that_only_this_machine_reaches(
    run: RunFolder, tmp_path: Path
) -> None:
    request = Request(run.leases, settings(tmp_path, launcher="local"))
    (path,) = run.leases.glob("*.json")
    asked = json.loads(path.read_text())
    asked["process"]["machine"] = "another"
    path.write_text(json.dumps(asked))
    tick(start(run))
    assert "local serves steps of its own machine, found one of another" in error_of(request)
    assert not present(run)


def test_a_server_whose_log_cannot_be_written_is_refused_and_leaves_nothing(
    run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    request = Request(run.leases, local_settings(tmp_path, log=tmp_path / "file/server.log"))
    supervisor = start(run)
    supervisor.tick()
    assert "file" in error_of(request)
    assert not list(run.servers.iterdir())
    supervisor.tick()
    request.give_back()
    supervisor.tick()
    assert not supervisor.is_needed


def test_a_lock_that_cannot_be_made_is_the_error_of_the_lease(
    run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    request = Request(run.leases, local_settings(tmp_path, state=tmp_path / "file/state"))
    start(run).tick()
    assert "file/state" in error_of(request)


def test_a_lock_that_cannot_be_written_is_not_held(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = GpuLock(run.folder, Process.current())
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", raise_no_space)
        with pytest.raises(OSError, match="No space left"):
            lock.take(tmp_path)
    assert lock.take(tmp_path)
    assert not GpuLock(run.folder, Process.current()).take(tmp_path), "the same run waits"
    lock.release()


def test_the_lock_of_a_living_run_is_named_and_that_of_an_ended_one_is_waited_for(
    run: RunFolder, tmp_path: Path
) -> None:
    here = Process.current()
    ended, elsewhere = (
        dataclasses.replace(here, **change) for change in ({"started": 1}, {"machine": "other"})
    )
    for holder, refusal in ((here, f"process {os.getpid()};"), (elsewhere, "of another machine")):
        lock = GpuLock(tmp_path / "other", holder)
        assert lock.take(tmp_path)
        with pytest.raises(UserError, match=refusal):
            GpuLock(run.folder, here).take(tmp_path)
        lock.release()
    lock = GpuLock(tmp_path / "other", ended)
    assert lock.take(tmp_path)
    assert not GpuLock(run.folder, here).take(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_named_with_the_key_to_change(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.flock", refuse)
    request = Request(run.leases, local_settings(tmp_path))
    start(run).tick()
    assert "with locks" in error_of(request) and "server.state" in error_of(request)


def test_a_server_that_cannot_be_started_leaves_no_descriptor(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstates.server.local.start_child", raise_no_space)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        LocalServer(local_settings(tmp_path), replica=0, key_config=run.key_config)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_answer_that_cannot_be_written_is_written_later(
    run: RunFolder, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = start(run)
    request = Request(run.leases, settings(tmp_path))
    tick(supervisor)
    ready(run)
    with monkeypatch.context() as full:
        full.setattr("draftstates.server.leases.overwrite", raise_no_space)
        with pytest.raises(OSError, match="No space left"):
            tick(supervisor)
    tick(supervisor)
    assert (request.answer() or {})["url"] == "http://node:1"


def test_a_failure_on_a_full_disk_ends_the_server_and_is_the_error_of_the_lease(
    run: RunFolder, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = start(run)
    request = Request(run.leases, settings(tmp_path))
    tick(supervisor)
    fail_all(run, lasting=False)
    with monkeypatch.context() as full:
        full.setattr(Path, "touch", raise_no_space)
        full.setattr("builtins.print", raise_no_space)
        tick(supervisor)
    assert "it refuses the model" in error_of(request)
    assert not queue.jobs


def test_the_end_of_a_server_is_noticed_without_its_log(run: RunFolder, tmp_path: Path) -> None:
    wanted = local_settings(tmp_path, command=["/bin/false"])
    server = LocalServer(wanted, replica=0, key_config=run.key_config)
    wanted.log.unlink()
    deadline = time.monotonic() + 60
    while not (failure := server.failure(ready=True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "status 1" in failure.error and "cannot be read" in failure.error
    while not server.is_gone():
        time.sleep(0.05)


def test_a_self_test_that_cannot_be_started_refuses_the_server(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstates.server.replica.health", lambda *_, **__: None)
    monkeypatch.setattr("draftstates.server.replica.open_log", raise_no_space)
    place = run.server("0")
    place.folder.mkdir()
    tested = Replica(
        local_settings(tmp_path, selftest=["true"]), Engine(0), api_key="k", number=0, place=place
    )
    failure = tested.failure()
    assert failure and "No space left" in failure.error
    assert not tested.ready


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The servers that supervisors on this machine have started."""
    started: list[Engine] = []

    def start_one(_: ServerSettings, *, replica: int, **__: object) -> Engine:
        started.append(Engine(replica))
        return started[-1]

    monkeypatch.setattr("draftstates.server.supervisor.LocalServer", start_one)
    return started


def test_a_replica_that_dies_before_the_others_are_ready_does_not_start_all_again_for_ever(
    run: RunFolder, engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "draftstates.server.replica.health",
        # the second loads on
        lambda url, **_: "loading" if url.endswith(":10") else None,
    )
    request = Request(run.leases, local_settings(tmp_path, replicas=2))
    supervisor = start(run)
    for _ in range(3):
        supervisor.tick()
    engines[0].dead = "out of memory"
    for _ in range(3):
        supervisor.tick()
    assert "out of memory" in error_of(request)
    assert len(engines) == 2


def test_servers_that_are_no_longer_wanted_take_one_that_was_to_start_again_along(
    run: RunFolder, engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstates.server.replica.health", lambda *_, **__: None)
    request = Request(run.leases, local_settings(tmp_path, replicas=2))
    supervisor = start(run)
    for _ in range(3):
        supervisor.tick()
    assert request.answer()
    monkeypatch.setattr(Engine, "is_gone", lambda engine: False)
    engines[0].dead = "killed"
    supervisor.tick()
    request.give_back()
    Request(run.leases, local_settings(tmp_path, replicas=2, kind="generate"))
    supervisor.tick()
    monkeypatch.setattr(Engine, "is_gone", lambda engine: True)
    supervisor.tick()
    assert len(engines) == 4, "the two of the next kind, and no third of the former one"


def test_the_key_of_an_external_server_is_in_no_error(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("secret-of-somebody\n")
    for module in ("external", "replica"):
        monkeypatch.setattr(f"draftstates.server.{module}.health", lambda *_, **__: None)
    said = 'import sys; print(open(sys.argv[1]).read()); sys.exit("refused")'
    wanted = settings(
        tmp_path,
        launcher="external",
        url="http://127.0.0.1:9",
        api_key_file=tmp_path / "key",
        selftest=["{python}", "-c", said, "{address}"],
    )
    request = Request(run.leases, wanted)
    supervisor = start(run)
    deadline = time.monotonic() + 60
    while not request.answer():
        assert time.monotonic() < deadline
        supervisor.tick()
    assert '"api_key": "<api key>"' in error_of(request)
    assert "secret" not in error_of(request)


@pytest.mark.parametrize("fails", [False, True])
def test_a_kept_server_that_is_unhealthy_for_a_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A server on a busy machine answers 503 where it could not look at itself in time."""
    address = Address(
        url="http://node:1", api_key=None, launcher="local", failed=tmp_path / "failed.json"
    )
    looks: list[str | None] = [None, "HTTP Error 503", "HTTP Error 503", None]
    clock = iter(range(0, 10_000, 50))

    def health(_url: str, *, seconds: float) -> str | None:
        if fails and len(looks) == 2:
            (tmp_path / "failed.json").write_text("{}")
        return looks.pop(0) if looks else "refused"

    monkeypatch.setattr("draftstates.server.lease.health", health)
    monkeypatch.setattr("draftstates.server.lease.time.sleep", lambda _: None)
    monkeypatch.setattr("draftstates.server.lease.time.monotonic", lambda: next(clock))
    assert _until_silent(address) == ("HTTP Error 503" if fails else "refused")
    assert len(looks) == (1 if fails else 0)
