"""Starts the servers of one machine's lease, announces them, ends them: `python -m draftstates.server.supervisor STATE READY_FD`.

It runs in a session of its own, from the first lease until nobody has leased for a while, every owner is gone, TERM, or a failure.
However it ends, the whole tree of processes below it ends too. A replica that fails while others serve is started again alone.
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
from draftstates.server.address import write_key_config
from draftstates.server.files import is_held, locked, write_private
from draftstates.server.launchers import LocalServer, gpus_of
from draftstates.server.processes import Process, become_subreaper, end_descendants, exit_on_term
from draftstates.server.replica import Replica, ServerFailed
from draftstates.server.settings import ServerSettings
from draftstates.server.state import State

_POLL_SECONDS = 0.2
_KEEPER_SECONDS = 3.0  # a keeper gets this long beyond its server's own grace


class Unwanted(Exception):
    """Nobody needs the servers any more."""


class Supervisor:
    """The servers from the first start to the last end."""

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
        """Serve until unwanted; a failure is left in the state for the clients."""
        try:
            write_key_config(self._state.key_config, self._api_key)
            for index in range(self._settings.replicas):
                self._start(index)
            while True:
                self._tick()
        except Unwanted:
            pass
        except ServerFailed as failure:
            write_private(self._state.failed, {"error": self._without_key(failure)})
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
            raise ServerFailed(str(error)) from error
        self._replicas[index] = Replica(self._settings, server, api_key=self._api_key, folder=self._state.replica(index))

    def _tick(self) -> None:
        """Wait a moment; raise what ends all servers."""
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
        # also where all end: the clients of each server learn what became of theirs
        write_private(self._state.failures / replica.generation, {"error": self._without_key(failure)})
        if not any(other.ready for other in self._replicas.values()):
            raise failure
        replica.end()
        self._ending[index] = replica

    def _gone(self, index: int) -> None:
        """Nothing is left of a failed replica, so its GPUs are free."""
        server = self._ending.pop(index).server
        if server.lost_its_keeper:
            raise ServerFailed(f"the process that keeps {server.url} was killed, so what is left of that server cannot be told apart")
        self._restarts[index] += 1
        if self._restarts[index] <= self._settings.restarts:
            print(f"{time.strftime('%F %T')} replica {index} is started again", flush=True)
            self._start(index)

    def _announce(self) -> None:
        """Tell the clients which replicas there are: first when none is starting, as those that start together are ready together."""
        if self._announced is None and not all(replica.ready for replica in self._replicas.values()):
            return
        ready = [replica for replica in self._replicas.values() if replica.ready]
        servers = [{"url": replica.address.url, "generation": replica.generation} for replica in ready]
        announced = {"servers": servers, "api_key": self._api_key, "launcher": self._settings.launcher}
        if announced != self._announced:
            write_private(self._state.address, announced)
            self._announced = announced

    def _owned(self) -> bool:
        return any(Process.parse(path.name).is_alive() for path in self._state.owners.iterdir())

    def _withdraw_if_unwanted(self) -> None:
        """Decide under the lock that every new lease takes, so that none gets an address that is about to die."""
        with contextlib.suppress(BlockingIOError), locked(self._state.start_lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if not self._owned() or not is_held(self._state.lease_lock, fcntl.LOCK_EX):
                self._state.address.unlink(missing_ok=True)
                raise Unwanted

    def _without_key(self, failure: ServerFailed) -> str:
        return str(failure).replace(self._api_key, "<api key>")


def main() -> None:
    state, ready = State(Path(sys.argv[1])), int(sys.argv[2])
    exit_on_term()
    become_subreaper()
    settings = ServerSettings.from_json(state.settings.read_text())
    with locked(state.alive_lock, fcntl.LOCK_EX):
        os.write(ready, b"x")
        os.close(ready)
        try:
            with locked(state.tree_lock, fcntl.LOCK_EX) as tree_lock:  # what a killed supervisor has left may still be ending
                Supervisor(state, settings, tree_lock=tree_lock).run()
        finally:
            end_descendants(settings.stop_seconds + _KEEPER_SECONDS)


if __name__ == "__main__":
    main()
