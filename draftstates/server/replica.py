"""One server from its start until clients may use it: its health, then its self-test."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Protocol

from draftstates.errors import LASTING_STATUS
from draftstates.files import open_log, tail, write_private
from draftstates.server.address import Address, health, read_address
from draftstates.server.folder import ServerFolder
from draftstates.server.lasting import Failure
from draftstates.server.local import fill
from draftstates.server.processes import start_child
from draftstates.server.settings import ServerSettings

_HEALTH_SECONDS = 2.0


class Engine(Protocol):
    """A started server, as `LocalServer` and `ExternalServer` are."""

    url: str

    def failure(self, *, ready: bool) -> Failure | None: ...
    def end(self) -> None: ...
    def is_gone(self) -> bool: ...
    def last_lines(self) -> str: ...


class Replica:
    """A watched server, whose address appears once it answers and has passed its self-test.

    Args:
        settings: settings of the server.
        engine: the server, just started.
        api_key: the server's key.
        number: number of the replica, counted from 0.
        place: folder of this server.

    Attributes:
        draining: whether the server gets no more clients.
    """

    draining = False

    def __init__(
        self,
        settings: ServerSettings,
        engine: Engine,
        *,
        api_key: str | None,
        number: int,
        place: ServerFolder,
    ) -> None:
        self.number = number
        self.place = place
        self._settings = settings
        self._engine = engine
        self._began = time.monotonic()
        self._look: Callable[[], Failure | None] = self._until_healthy
        self._test: subprocess.Popen[bytes] | None = None
        self.address = Address(url=engine.url, api_key=api_key, launcher=settings.launcher)
        # None until the server is ready
        self.start_seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.address.url} {'is ready' if self.ready else 'starts'}"

    @property
    def ready(self) -> bool:
        """Whether the server has passed its self-test."""
        return self.start_seconds is not None

    def failure(self) -> Failure | None:
        """Check the server once, without a long wait.

        Returns:
            Why the server died, was not ready in time, or failed its self-test; None if it is well.
        """
        return self._engine.failure(ready=self.ready) or self._look()

    def end(self) -> None:
        """Begin to end the processes of the server."""
        if self._test and self._test.poll() is None:
            self._test.kill()
            self._test.wait()
        self._engine.end()

    def is_gone(self) -> bool:
        """Return whether the processes of the server have ended."""
        return self._engine.is_gone()

    def _until_healthy(self) -> Failure | None:
        problem = health(self.address.url, seconds=_HEALTH_SECONDS)
        if problem is None:
            failure = self._start_selftest() if self._settings.selftest else None
            self._look = self._until_tested
            return failure
        if not self._is_late():
            return None
        limit = self._settings.start_seconds
        return Failure(
            f"the server was not ready within {limit:g} s ({problem}); the last lines of"
            f" {self._settings.log_of(self.number)}:\n{self._engine.last_lines()}"
        )

    def _until_tested(self) -> Failure | None:
        status = self._test.poll() if self._test else 0
        if status is None:
            if not self._is_late():
                return None
            limit = self._settings.start_seconds
            return Failure(f"the server's self-test did not end within {limit:g} s of the start")
        if status:
            return Failure(
                f"the server failed its self-test (status {status}):\n"
                f"{tail(self.place.selftest_log)}",
                lasting=status == LASTING_STATUS,
            )
        if self._test:
            # the self-test adds the name of the server that has passed it
            self.address = read_address(self.place.candidate)
        start_seconds = time.monotonic() - self._began
        found = {"url": self.address.url, "start_seconds": start_seconds}
        write_private(self.place.address, found)
        self.place.candidate.unlink(missing_ok=True)
        self.start_seconds = start_seconds
        self._look = lambda: None
        return None

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > self._settings.start_seconds

    def _start_selftest(self) -> Failure | None:
        """Start the self-test with the address, which no client has yet."""
        values = {"{address}": str(self.place.candidate), "{python}": sys.executable}
        command = fill(self._settings.selftest, values)
        try:
            self.address.write(self.place.candidate)
            output = open_log(self.place.selftest_log)
        except OSError as error:
            return Failure(f"the self-test cannot be started: {error}")
        try:
            self._test = start_child(
                command,
                when_orphaned=signal.SIGKILL,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._settings.env},
            )
        except OSError as error:
            said = f"the self-test {command[0]} cannot be started: {error.strerror}"
            return Failure(said, lasting=True)
        finally:
            os.close(output)
        return None
