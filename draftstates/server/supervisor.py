"""The supervisor, a process that decides about all servers of one run.

Command: `python -m draftstates.server.supervisor RUN_FOLDER`.

The supervisor runs on the machine of the run's owner, in a session of its own. It ends when nobody
needs it, on TERM, and when the owner is gone. However it ends, the whole tree of processes below it
ends too, and so do the server jobs. A server that fails while others serve is started again alone.
"""

import contextlib
import dataclasses
import secrets
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from draftstates.errors import LastingError, UserError
from draftstates.files import read_json, write_private
from draftstates.server.address import write_key_config
from draftstates.server.external import ExternalServer
from draftstates.server.folder import RunFolder, beat, is_there, leave_error, say
from draftstates.server.gpus import GpuLock
from draftstates.server.lasting import Failure
from draftstates.server.leases import Leases
from draftstates.server.local import LocalServer, gpus_of
from draftstates.server.processes import (
    Process,
    become_subreaper,
    end_descendants,
    exit_on_term,
    ignore,
)
from draftstates.server.replica import Replica
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm import commands
from draftstates.server.slurm.server import Queue, SlurmServer

_POLL_SECONDS = 0.2
_BEAT_SECONDS = 1.0
# time that a keeper gets beyond the time that its server gets
_KEEPER_SECONDS = 3.0
_STOPPED = "the server was stopped while it was in use"

Server = Replica | SlurmServer


class Supervisor:
    """The servers and leases of one run.

    Args:
        run: the run folder.
        owner: the process with which the run ends.
    """

    def __init__(self, run: RunFolder, owner: Process) -> None:
        self._run = run
        self._api_key = secrets.token_hex(32)
        write_key_config(run.key_config, self._api_key)
        self._leases = Leases(run.leases)
        self._queue = Queue(run)
        # settings of the present servers
        self._settings: ServerSettings | None = None
        self._servers: list[Server] = []
        self._ending: list[Server] = []
        # numbers of the replicas that are started again when their processes have ended
        self._again: set[int] = set()
        self._restarts: Counter[int] = Counter()
        self._gpus = GpuLock(run.folder, owner)
        self._began = 0.0
        # whether leases have been handed out since the servers began
        self._together = False
        # a server that is left has no supervisor any more: what it writes is read by nobody
        for folder in run.servers.iterdir():
            self._withdraw(folder.name, "its supervisor was killed")

    @property
    def is_needed(self) -> bool:
        """Whether a server is there, or a lease waits for one."""
        return bool(self._leases.waiting() or self._servers or self._ending)

    @property
    def stop_seconds(self) -> float:
        """Time that the processes of the servers get to end."""
        return self._settings.stop_seconds if self._settings else 0.0

    def tick(self) -> None:
        """Check leases and servers once, and act on the result."""
        self._leases.look()
        self._refuse()
        self._look()
        if not self._servers and not self._ending:
            self._gpus.release()
            if waiting := self._leases.waiting():
                self._begin(waiting[0].settings)
        self._hand_out()
        self._end_unwanted()
        self._tell()

    def end(self) -> None:
        """Begin to end all servers."""
        self._again.clear()
        for server in list(self._servers):
            self._end(server, _STOPPED)

    def _refuse(self) -> None:
        """Refuse leases on servers that can never serve, or not beside the present ones."""
        for lease in self._leases.waiting():
            settings = lease.settings
            if failed := read_json(self._run.lasting / settings.fingerprint):
                lease.refuse(failed["error"])
            elif settings.launcher == "local" and not lease.process.reaches_loopback:
                lease.refuse(
                    "server.launcher: local serves steps of its own machine, found one of another:"
                    f" {lease.client}; use slurm or external"
                )
            elif (
                self._settings
                and self._in_use()
                and settings.kind == self._settings.kind
                and settings.fingerprint != self._settings.fingerprint
            ):
                lease.refuse(
                    f"{self._run.folder}: a server with other settings runs there for the same run;"
                    " wait until that is given back"
                )
            elif (
                self._settings
                and settings.kind != self._settings.kind
                and (by := self._leases.keeper({one.place.generation for one in self._servers}))
            ):
                lease.refuse(
                    f"a run has servers of one kind at a time: expected `{settings.kind}`, found"
                    f" `{self._settings.kind}`, which `draftstates serve` keeps up ({by}); end that"
                    " with Ctrl-C, and run this step without DRAFTSTATES_RUN_FOLDER"
                )

    def _begin(self, settings: ServerSettings) -> None:
        """Start all replicas, once no other server computes on the same GPUs."""
        if settings.launcher == "local":
            try:
                free = self._gpus.take(settings.state)
            except (UserError, OSError) as error:
                self._refuse_all(settings, Failure(str(error)))
                return
            if not free:
                return
        if settings.launcher == "slurm":
            # jobs that a killed supervisor has left
            commands.cancel(commands.queue(self._queue.job_name) or ())
        self._settings = settings
        self._restarts.clear()
        self._again.clear()
        self._together = False
        self._began = time.time()
        for number in range(1 if settings.launcher == "external" else settings.replicas):
            if failure := self._start(number):
                self._fail_all(failure)
                return

    def _start(self, number: int) -> Failure | None:
        """Start one replica; return why that is impossible, or None."""
        settings = self._settings
        assert settings
        place = self._run.server(f"{number}-{secrets.token_hex(8)}")
        common = {"number": number, "place": place}
        try:
            place.folder.mkdir(mode=0o700)
            if settings.launcher == "slurm":
                server: Server = SlurmServer(
                    self._run, settings, self._queue, api_key=self._api_key, **common
                )
            elif settings.launcher == "external":
                external = ExternalServer(settings)
                server = Replica(settings, external, api_key=external.api_key, **common)
            else:
                engine = LocalServer(
                    settings,
                    replica=number,
                    key_config=self._run.key_config,
                    environment=gpus_of(settings, number),
                    held=self._gpus.held,
                )
                server = Replica(settings, engine, api_key=self._api_key, **common)
        except (UserError, OSError) as error:
            # a job that Slurm has accepted all the same finds no settings, and ends
            shutil.rmtree(place.folder, ignore_errors=True)
            return Failure(str(error), lasting=isinstance(error, LastingError))
        self._servers.append(server)
        return None

    def _look(self) -> None:
        """Check each server; end, replace and start again what needs it."""
        for server in list(self._servers):
            was_ready, was_draining = server.ready, server.draining
            # the failure of all servers, found at one of them, ends the others
            if server not in self._servers:
                continue
            if failure := server.failure():
                self._failed(server, failure.without(server.address.api_key))
            elif server.draining and not was_draining:
                say(str(server))
                self._replace(server.number)
            elif server.ready and not was_ready:
                say(str(server))
        for server in [one for one in self._ending if one.is_gone()]:
            self._ending.remove(server)
            if server.number in self._again:
                self._again.remove(server.number)
                say(f"replica {server.number} is started again")
                self._replace(server.number)

    def _replace(self, number: int) -> None:
        if failure := self._start(number):
            say(f"replica {number} is given up: {failure.error}")

    def _failed(self, server: Server, failure: Failure) -> None:
        say(f"replica {server.number} has failed: {failure.error}")
        self._end(server, failure.error)
        if server.draining:
            return
        if not any(other.ready for other in self._servers):
            # after a server that has served, the leases that wait get another one
            served = server.ready and self._together
            self._fail_all(failure, refuse=not served or failure.lasting)
            return
        assert self._settings
        self._restarts[server.number] += 1
        if not failure.lasting and self._restarts[server.number] <= self._settings.restarts:
            self._again.add(server.number)

    def _fail_all(self, failure: Failure, *, refuse: bool = True) -> None:
        """End all servers, and perhaps refuse the leases that wait for them."""
        assert self._settings
        self._again.clear()
        for server in list(self._servers):
            self._end(server, failure.error)
        if refuse:
            self._refuse_all(self._settings, failure)

    def _refuse_all(self, settings: ServerSettings, failure: Failure) -> None:
        error = failure.for_clients()
        for lease in self._leases.waiting():
            if lease.settings.fingerprint == settings.fingerprint:
                lease.refuse(error)
        if failure.lasting:
            write_private(self._run.lasting / settings.fingerprint, {"error": error})

    def _end(self, server: Server, why: str) -> None:
        """Begin to end a server; its clients read why."""
        self._servers.remove(server)
        self._ending.append(server)
        try:
            self._withdraw(server.place.generation, why)
        # the server ends, and its leases are answered, although its clients do not read why
        except OSError as error:
            say(str(error))
        server.end()

    def _withdraw(self, generation: str, why: str) -> None:
        place = self._run.server(generation)
        place.address.unlink(missing_ok=True)
        place.stop.touch()
        if not place.failed.exists():
            leave_error(self._run, place, why)

    def _hand_out(self) -> None:
        """Give each lease that waits for the present servers the least busy one."""
        settings = self._settings
        # Replicas of one machine that start together are ready together: the first leases wait for
        # all of them, or one server would get them all.
        if not settings or (
            settings.launcher == "local"
            and not self._together
            and not all(server.ready for server in self._servers)
        ):
            return
        accepting = [one for one in self._servers if one.ready and not one.draining]
        self._together = self._together or bool(accepting)
        for lease in self._leases.waiting():
            if accepting and lease.settings.fingerprint == settings.fingerprint:
                server = min(accepting, key=lambda one: self._leases.on(one.place.generation))
                address = server.address
                lease.grant(
                    server.place.generation,
                    {"url": address.url, "api_key": address.api_key, "server": address.server},
                )

    def _in_use(self) -> bool:
        return any(self._leases.on(server.place.generation) for server in self._servers)

    def _end_unwanted(self) -> None:
        """End servers that are near their time limit, idle, or in the way of another kind."""
        for server in [one for one in self._servers if one.draining]:
            if not self._leases.on(server.place.generation):
                self._end(server, _STOPPED)
        settings = self._settings
        if not settings or not self._servers or self._in_use():
            return
        waiting = [lease.settings.fingerprint for lease in self._leases.waiting()]
        if settings.fingerprint in waiting:
            return
        # A server with a long start stays for longer, because a new start would cost as much. Jobs
        # that verify and store a shard hold no lease, and the next ones need the server.
        starts = [one.start_seconds or 0.0 for one in self._servers]
        keep = max(settings.idle_seconds, *starts)
        idle = time.monotonic() - self._leases.last_there > keep
        if waiting or (idle and settings.launcher != "external"):
            self.end()

    def _tell(self) -> None:
        """Write the state of the servers for whoever waits."""
        starting = bool(self._servers) and not any(server.ready for server in self._servers)
        status = {
            "servers": "; ".join(map(str, self._servers)) or "earlier servers are ending",
            "starting": self._began if starting else None,
            "log": str(self._settings.log_of(0)) if self._settings else "",
        }
        if status != read_json(self._run.status):
            write_private(self._run.status, status)


def _keep_beating(heartbeat: Path) -> Callable[[], None]:
    """Beat in a thread: a tick may wait for Slurm for longer than clients and jobs do.

    Returns:
        A function that ends the thread.
    """
    done = threading.Event()

    def keep() -> None:
        while True:
            with contextlib.suppress(OSError):
                beat(heartbeat)
            if done.wait(_BEAT_SECONDS):
                return

    thread = threading.Thread(target=keep, name="heartbeat", daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        # a beat that is late would bring the file back
        thread.join()

    return stop


def serve(run: RunFolder, owner: Process) -> None:
    """Run a supervisor until nobody needs it or the owner is gone."""
    supervisor = Supervisor(run, owner)
    stop_beating = _keep_beating(run.heartbeat)
    try:
        while owner.is_alive() and is_there(run.folder, unknown=True):
            try:
                supervisor.tick()
                if not supervisor.is_needed:
                    return
            # a file server may be unavailable for a moment
            except OSError as error:
                say(str(error))
            time.sleep(_POLL_SECONDS)
    finally:
        # TERM would end the clean-up
        ignore(signal.SIGTERM)
        stop_beating()
        over = not owner.is_alive()
        if over:
            # from now on no error of a server counts, and every other process of the run ends
            for path in (run.owner, run.heartbeat):
                path.unlink(missing_ok=True)
        with contextlib.suppress(UserError, OSError):
            supervisor.end()
        end_descendants(supervisor.stop_seconds + _KEEPER_SECONDS)
        run.key_config.unlink(missing_ok=True)
        if over:
            shutil.rmtree(run.folder, ignore_errors=True)


def main() -> None:
    """Run a supervisor for the run folder of the command line."""
    exit_on_term()
    become_subreaper()
    run = RunFolder(Path(sys.argv[1]))
    owner, _ = run.read_owner()
    write_private(run.supervisor, dataclasses.asdict(Process.current()))
    serve(run, owner)


if __name__ == "__main__":
    main()
