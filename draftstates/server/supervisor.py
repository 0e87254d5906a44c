"""The supervisor, a process that starts, announces and ends the servers of one machine.

Command: `python -m draftstates.server.supervisor STATE READY_FD`.

The supervisor runs in a session of its own. It starts with the first lease and ends when no client
has held a lease for some time, when every owner is gone, on TERM, or after a failure. However it
ends, the whole tree of processes below it ends too. A replica that fails while others serve is
started again alone.
"""

import contextlib
import fcntl
import os
import secrets
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.files import is_held, locked, write_private
from draftstates.server.address import write_key_config
from draftstates.server.lasting import Failed, with_note
from draftstates.server.launchers import LocalServer, gpus_of
from draftstates.server.processes import Process, become_subreaper, end_descendants, exit_on_term
from draftstates.server.replica import Replica, ServerFailed
from draftstates.server.settings import ServerSettings
from draftstates.server.state import State

_POLL_SECONDS = 0.2
# time that a keeper gets beyond the time that its server gets
_KEEPER_SECONDS = 3.0


class Unwanted(Exception):
    """The signal that no client needs the servers any more."""


class Supervisor:
    """The servers of one machine, from the first start to the last end."""

    def __init__(self, state: State, settings: ServerSettings, *, tree_lock: int) -> None:
        self._state = state
        self._settings = settings
        self._tree_lock = tree_lock
        self._api_key = secrets.token_hex(32)
        self._replicas: dict[int, Replica] = {}
        self._ending: dict[int, Replica] = {}
        self._restarts: Counter[int] = Counter()
        self._announced: dict[str, Any] | None = None
        self._last_leased = time.monotonic()

    def run(self) -> None:
        """Serve until no client needs a server; write a failure into the state for the clients."""
        try:
            write_key_config(self._state.key_config, self._api_key)
            for index in range(self._settings.replicas):
                self._start(index)
            while True:
                self._tick()
        except Unwanted:
            pass
        except ServerFailed as failure:
            self._record(failure)
        finally:
            self._state.address.unlink(missing_ok=True)

    def _start(self, index: int) -> None:
        try:
            server = LocalServer(
                self._settings,
                replica=index,
                key_config=self._state.key_config,
                environment=gpus_of(self._settings, index),
                held=(self._tree_lock,),
            )
        except UserError as error:
            raise ServerFailed(str(error), lasting=True) from error
        self._replicas[index] = Replica(
            self._settings, server, api_key=self._api_key, folder=self._state.replica(index)
        )

    def _record(self, failure: ServerFailed) -> None:
        """Write why no server is left, for the clients that wait and for those that come later."""
        Failed(
            error=with_note(self._without_key(failure), lasting=failure.lasting),
            lasting=failure.lasting,
            fingerprint=self._settings.fingerprint,
            owners=tuple(path.name for path in self._state.owners.iterdir()),
        ).write(self._state.failed)

    def _tick(self) -> None:
        """Wait a moment, and check every replica once.

        Raises:
            Unwanted: no client needs the servers any more.
            ServerFailed: a server has failed and no other one is ready.
        """
        time.sleep(_POLL_SECONDS)
        for index, replica in list(self._replicas.items()):
            try:
                replica.tick()
            except ServerFailed as failure:
                self._failed(index, failure)
        for index, replica in list(self._ending.items()):
            if replica.server.is_gone():
                self._gone(index)
        self._announce()
        if is_held(self._state.lease_lock, fcntl.LOCK_EX):
            self._last_leased = time.monotonic()
        idle = time.monotonic() - self._last_leased > self._settings.idle_seconds
        if idle or not self._owned():
            self._withdraw_if_unwanted()

    def _failed(self, index: int, failure: ServerFailed) -> None:
        replica = self._replicas.pop(index)
        # also if all servers end: the clients of each server read how their server failed
        write_private(
            self._state.failures / replica.generation, {"error": self._without_key(failure)}
        )
        if not any(other.ready for other in self._replicas.values()):
            raise failure
        if failure.lasting:
            self._restarts[index] = self._settings.restarts
        replica.end()
        self._ending[index] = replica

    def _gone(self, index: int) -> None:
        """Start a failed replica again: its processes have ended, so its GPUs are free."""
        server = self._ending.pop(index).server
        if server.lost_its_keeper:
            raise ServerFailed(
                f"the process that keeps {server.url} was killed, so what is left of that server"
                " cannot be told apart"
            )
        self._restarts[index] += 1
        if self._restarts[index] <= self._settings.restarts:
            print(f"{time.strftime('%F %T')} replica {index} is started again", flush=True)
            self._start(index)

    def _announce(self) -> None:
        """Write the address of each ready replica for the clients.

        The first announcement waits until no replica is starting, because replicas that start
        together are ready together.
        """
        if self._announced is None and not all(
            replica.ready for replica in self._replicas.values()
        ):
            return
        ready = [replica for replica in self._replicas.values() if replica.ready]
        servers = [
            {"url": replica.address.url, "generation": replica.generation} for replica in ready
        ]
        announced = {
            "servers": servers,
            "api_key": self._api_key,
            "launcher": self._settings.launcher,
        }
        if announced != self._announced:
            write_private(self._state.address, announced)
            self._announced = announced

    def _owned(self) -> bool:
        return any(Process.parse(path.name).is_alive() for path in self._state.owners.iterdir())

    def _withdraw_if_unwanted(self) -> None:
        """End the servers if no client needs them.

        The decision is made under the lock that every new lease takes, so that no lease gets the
        address of a server that is about to end.
        """
        with (
            contextlib.suppress(BlockingIOError),
            locked(self._state.start_lock, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            if not self._owned() or not is_held(self._state.lease_lock, fcntl.LOCK_EX):
                self._state.address.unlink(missing_ok=True)
                raise Unwanted

    def _without_key(self, failure: ServerFailed) -> str:
        return str(failure.without(self._api_key))


def _clear(state: State) -> None:
    """Remove the key and the owners of servers that have ended.

    A client that has just joined adds its owner again when it finds these servers gone.
    """
    for path in (state.key_config, *state.owners.iterdir()):
        path.unlink(missing_ok=True)


def main() -> None:
    """Run a supervisor for the state folder of the command line."""
    state, ready = State(Path(sys.argv[1])), int(sys.argv[2])
    exit_on_term()
    become_subreaper()
    settings = ServerSettings.from_json(state.settings.read_text())
    with locked(state.alive_lock, fcntl.LOCK_EX):
        os.write(ready, b"x")
        os.close(ready)
        # waits for processes that a killed supervisor left behind and that are still ending
        with locked(state.tree_lock, fcntl.LOCK_EX) as tree_lock:
            try:
                Supervisor(state, settings, tree_lock=tree_lock).run()
            finally:
                # before the lock is released, or the next server would find the GPU in use
                end_descendants(settings.stop_seconds + _KEEPER_SECONDS)
                _clear(state)


if __name__ == "__main__":
    main()
