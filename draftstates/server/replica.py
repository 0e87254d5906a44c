"""One server from its start until clients may use it."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from draftstates.errors import LASTING_STATUS
from draftstates.files import open_log
from draftstates.server.acceptance import selftest_arguments, selftest_failure
from draftstates.server.address import Address, health
from draftstates.server.lasting import refused_by_engine
from draftstates.server.launchers import LocalServer, ending
from draftstates.server.processes import die_with_parent
from draftstates.server.settings import ServerSettings

_HEALTH_SECONDS = 2.0


class ServerFailed(Exception):
    """The failure of a server; every client that waits for the server or uses it gets its text.

    Attributes:
        lasting: whether every start would end in the same way (see `lasting`).
    """

    def __init__(self, error: str, *, lasting: bool = False) -> None:
        super().__init__(error)
        self.lasting = lasting

    def without(self, api_key: str) -> "ServerFailed":
        """Return the failure without the server's key in its text."""
        return ServerFailed(str(self).replace(api_key, "<api key>"), lasting=self.lasting)


class Replica:
    """A watched server, which is `ready` once it answers and has passed its self-test.

    Args:
        settings: settings of the server.
        server: the server, just started.
        api_key: the server's key.
        folder: folder of this replica alone, for its address, which no client has yet, and the log
            of the self-test.
    """

    def __init__(
        self, settings: ServerSettings, server: LocalServer, *, api_key: str, folder: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._settings = settings
        self._candidate = folder / "candidate.json"
        self._selftest_log = folder / "selftest.log"
        self._began = time.monotonic()
        self._look: Callable[[], None] = self._until_healthy
        self._test: subprocess.Popen[bytes] | None = None
        self.server = server
        self.address = Address(url=server.url, api_key=api_key, launcher=settings.launcher)
        self.generation = secrets.token_hex(8)
        # None until the server is ready
        self.start_seconds: float | None = None

    @property
    def ready(self) -> bool:
        """Whether the server has passed its self-test."""
        return self.start_seconds is not None

    def tick(self) -> None:
        """Check the server once, without a long wait.

        Raises:
            ServerFailed: the server died, was not ready in time, or failed its self-test.
        """
        code = self.server.exit_code()
        if code is not None:
            refused = not self.ready and refused_by_engine(code, self.server.last_lines(2000))
            raise ServerFailed(
                f"the server {ending(code)}; the last lines of"
                f" {self.server.log}:\n{self.server.last_lines()}",
                lasting=refused,
            )
        self._look()

    def end(self) -> None:
        """Begin to end the processes of the server."""
        if self._test and self._test.poll() is None:
            self._test.kill()
            self._test.wait()
        self.server.end()

    def _until_healthy(self) -> None:
        problem = health(self.server.url, seconds=_HEALTH_SECONDS)
        if problem is None:
            self._start_selftest()
            self._look = self._until_tested
        elif self._is_late():
            raise ServerFailed(
                f"the server was not ready within {self._settings.start_seconds:g} s ({problem}); "
                f"the last lines of {self.server.log}:\n{self.server.last_lines()}"
            )

    def _until_tested(self) -> None:
        status = self._test.poll() if self._test else 0
        if status is None:
            if self._is_late():
                raise ServerFailed(
                    f"the server's self-test did not end within {self._settings.start_seconds:g} s"
                    " of the start"
                )
            return
        if status:
            raise ServerFailed(
                selftest_failure(status, self._selftest_log), lasting=status == LASTING_STATUS
            )
        self._candidate.unlink()
        self.start_seconds = time.monotonic() - self._began
        self._look = lambda: None

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > self._settings.start_seconds

    def _start_selftest(self) -> None:
        """Start the self-test with the address, which no client has yet."""
        self.address.write(self._candidate)
        if not self._settings.selftest:
            return
        command, environment = selftest_arguments(self._settings, self._candidate)
        self._selftest_log.unlink(missing_ok=True)
        output = open_log(self._selftest_log)
        try:
            self._test = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise ServerFailed(
                f"the self-test {command[0]} cannot be started: {error.strerror}", lasting=True
            ) from error
        finally:
            os.close(output)
