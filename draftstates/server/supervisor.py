"""Starts the servers of one lease, announces them, ends them: `python -m draftstates.server.supervisor STATE READY_FD`.

It runs in a session of its own, from the first lease until nobody has leased for a while, every owner is gone, TERM, or a failure.
However it ends, the whole tree of processes below it ends too.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from draftstates.server.acceptance import selftest_arguments, selftest_failure
from draftstates.server.address import Address, health
from draftstates.server.files import is_held, locked, open_log, write_private
from draftstates.server.launchers import LocalServer
from draftstates.server.processes import Process, become_subreaper, die_with_parent, end_descendants, exit_on_term
from draftstates.server.settings import ServerSettings
from draftstates.server.state import State

_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 2.0
_KEEPER_SECONDS = 3.0  # a keeper gets this long beyond its server's own grace


class ServerFailed(Exception):
    """What everyone who waits for the server, or uses it, is told."""


class Unwanted(Exception):
    """Nobody needs the server any more."""


class Supervisor:
    """One start of the servers, and their end."""

    def __init__(self, state: State, settings: ServerSettings, *, tree_lock: int) -> None:
        self._state = state
        self._settings = settings
        self._tree_lock = tree_lock
        self._api_key = secrets.token_hex(32)
        self._generation = secrets.token_hex(8)
        self._servers: list[LocalServer] = []
        self._last_leased = time.monotonic()

    def run(self) -> None:
        """Serve until unwanted; a failure is left in the state for the clients."""
        try:
            self._start()
            deadline = time.monotonic() + self._settings.start_seconds
            self._until_healthy(deadline)
            self._until_tested(deadline)
            os.replace(self._state.candidate, self._state.address)
            while True:
                self._tick()
        except Unwanted:
            pass
        except ServerFailed as failure:
            message = str(failure).replace(self._api_key, "<api key>")
            write_private(self._state.failed, {"generation": self._generation, "error": message})
        finally:
            self._state.withdraw()

    def _start(self) -> None:
        # SGLang takes its key from argv or from the YAML of --config; only argv is open to every user of the machine.
        write_private(self._state.key_config, f"api-key: {self._api_key}\n")
        for replica in range(self._settings.replicas):
            server = LocalServer(self._settings, replica=replica, key_config=self._state.key_config, tree_lock=self._tree_lock)
            self._servers.append(server)

    def _tick(self) -> None:
        """Wait a moment; raise what ends the server."""
        time.sleep(_POLL_SECONDS)
        for server in self._servers:
            if death := server.death():
                raise ServerFailed(f"the server {death}; the last lines of {server.log}:\n{server.last_lines()}")
        if is_held(self._state.lease_lock, fcntl.LOCK_EX):
            self._last_leased = time.monotonic()
        idle = time.monotonic() - self._last_leased > self._settings.idle_seconds
        if idle or not self._owned():
            self._withdraw_if_unwanted()

    def _owned(self) -> bool:
        return any(Process.parse(path.name).is_alive() for path in self._state.owners.iterdir())

    def _withdraw_if_unwanted(self) -> None:
        """Decide under the lock that every new lease takes, so that none gets an address that is about to die."""
        with contextlib.suppress(BlockingIOError), locked(self._state.start_lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if not self._owned() or not is_held(self._state.lease_lock, fcntl.LOCK_EX):
                self._state.withdraw()
                raise Unwanted

    def _until_healthy(self, deadline: float) -> None:
        waiting = list(self._servers)
        while waiting:
            self._tick()
            problem = health(waiting[0].url, seconds=_HEALTH_SECONDS)
            if problem is None:
                waiting.pop(0)
            elif time.monotonic() > deadline:
                raise ServerFailed(
                    f"the server was not ready within {self._settings.start_seconds:g} s ({problem}); "
                    f"the last lines of {waiting[0].log}:\n{waiting[0].last_lines()}"
                )

    def _until_tested(self, deadline: float) -> None:
        """Run the self-test on the address that nobody else has yet."""
        address = Address(urls=[server.url for server in self._servers], api_key=self._api_key, launcher=self._settings.launcher)
        address.write(self._state.candidate, generation=self._generation)
        if not self._settings.selftest:
            return
        test = self._start_selftest()
        while test.poll() is None:
            self._tick()
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server's self-test did not end within {self._settings.start_seconds:g} s of the start")
        if test.returncode:
            raise ServerFailed(selftest_failure(test.returncode, self._state.selftest_log))

    def _start_selftest(self) -> "subprocess.Popen[bytes]":
        command, environment = selftest_arguments(self._settings, self._state)
        self._state.selftest_log.unlink(missing_ok=True)
        output = open_log(self._state.selftest_log)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise ServerFailed(f"the self-test {command[0]} cannot be started: {error.strerror}") from error
        finally:
            os.close(output)


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
