"""The launcher `local`: servers as trees of processes on this machine."""

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from draftstates.containers import STEP_VARIABLES
from draftstates.errors import LastingError, UserError
from draftstates.files import open_log, tail
from draftstates.server.gpus import VISIBLE_GPUS, visible_gpus
from draftstates.server.lasting import Failure, refused_by_engine
from draftstates.server.processes import kill_orphans, start_child
from draftstates.server.settings import ServerSettings

LOOPBACK = "127.0.0.1"
# below Linux's ephemeral range: a model loads for minutes before its server binds the port
_PORTS = (15000, 32000)
_THREADS = [f"{name}_NUM_THREADS" for name in ["OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR"]]
_THREADS.append("VECLIB_MAXIMUM_THREADS")


class LocalServer:
    """One server as a process of this machine, on a free port of `host`.

    Args:
        settings: settings of the server.
        replica: number of the replica, counted from 0.
        key_config: YAML file with the server's key.
        host: address that the server binds.
        environment: variables added to those of the settings.
        held: descriptors, such as locks, that stay open until the last process of the server has
            ended.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        replica: int,
        key_config: Path,
        host: str = LOOPBACK,
        environment: dict[str, str] | None = None,
        held: tuple[int, ...] = (),
    ) -> None:
        self.log = settings.log_of(replica)
        port = free_port(host)
        self.url = f"http://{host}:{port}"
        command = server_command(
            settings, host=host, port=port, key_config=key_config, replica=replica
        )
        if settings.image and settings.scratch:
            settings.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        output = open_log(self.log)
        self._report, report = os.pipe()
        try:
            os.write(output, f"--- {time.strftime('%F %T')} {command}\n".encode())
            self._log_start = os.fstat(output).st_size
            os.set_blocking(self._report, False)
            keeper = [sys.executable, "-m", "draftstates.server.keeper"]
            self._keeper = start_child(
                [*keeper, str(settings.stop_seconds), str(report), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**_own_environment(settings), **settings.env, **(environment or {})},
                # the keeper inherits the held descriptors; the server inherits none of them
                pass_fds=(*held, report),
                when_orphaned=signal.SIGTERM,
            )
        except OSError:
            os.close(self._report)
            raise
        finally:
            os.close(output)
            os.close(report)

    def failure(self, *, ready: bool) -> Failure | None:
        """Return how the server ended, or None while it runs.

        Processes that the server left behind may still be ending.

        Args:
            ready: whether the server was ready: what ends later is not refused by the engine.
        """
        try:
            reported = os.read(self._report, 16)
        except BlockingIOError:
            return None
        # an empty report means that the keeper itself was killed
        code = int(reported) if reported else self._keeper.wait()
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"exited with status {code}"
        return Failure(
            f"the server {how}; the last lines of {self.log}:\n{self.last_lines()}",
            lasting=not ready and refused_by_engine(code, self.last_lines(2000)),
        )

    def end(self) -> None:
        """Begin to end the whole tree of processes."""
        self._keeper.terminate()

    def is_gone(self) -> bool:
        """Return whether the whole tree of processes has ended."""
        if self._keeper.poll() is None:
            return False
        # what a killed keeper leaves behind has become this process's own
        if self._keeper.returncode < 0 and kill_orphans():
            return False
        os.close(self._report)
        return True

    def last_lines(self, lines: int = 20) -> str:
        """Return the last lines of the log, without those of earlier servers."""
        return tail(self.log, start=self._log_start, lines=lines)


def _own_environment(settings: ServerSettings) -> dict[str, str]:
    """Return this process's environment without the variables that are not meant for a server.

    Snakemake sets variables that limit a step of one thread to one thread. This limit is that of
    the step that happens to start the server, and not that of the server. A server in an image
    needs no variable that is meant for the containers of steps.
    """
    own = {name: value for name, value in os.environ.items() if name not in _THREADS}
    if not settings.image:
        return own
    own = {name: value for name, value in own.items() if name not in STEP_VARIABLES}
    # this process's PYTHONPATH names folders of the host
    return {**own, "APPTAINERENV_PYTHONPATH": ""}


def server_command(
    settings: ServerSettings, *, host: str, port: int, key_config: Path, replica: int = 0
) -> list[str]:
    """Return the argv that starts a server on the host, by Apptainer if the server has an image."""
    values = {"{host}": host, "{port}": str(port), "{key_config}": str(key_config)}
    values["{replica}"] = str(replica)
    if settings.image is None:
        return fill(settings.command, {**values, "{python}": sys.executable})
    contained = ["--contain", *(["--workdir", str(settings.scratch)] if settings.scratch else [])]
    command = fill(settings.command, {**values, "{python}": "python"})
    return ["apptainer", "exec", *contained, *settings.image_args, str(settings.image), *command]


def fill(command: list[str], values: dict[str, str]) -> list[str]:
    """Return `command` with each placeholder replaced.

    Other braces stay, because arguments may be JSON.
    """
    filled = []
    for argument in command:
        for name, value in values.items():
            argument = argument.replace(name, value)
        filled.append(argument)
    return filled


def gpus_of(settings: ServerSettings, replica: int) -> dict[str, str]:
    """Return the variables that give a local replica GPUs of its own.

    The GPUs are taken from those that this process sees.

    Raises:
        LastingError: this process sees too few GPUs.
    """
    each = settings.gpus_each
    if not each or settings.replicas == 1:
        return {}
    gpus = visible_gpus()
    if len(gpus) < each * settings.replicas:
        needed = f"{settings.replicas} replicas of {each} GPUs"
        raise LastingError(
            f"server.replicas: {needed} need {each * settings.replicas}, found {len(gpus)}"
            f" ({','.join(gpus)})"
        )
    return {VISIBLE_GPUS: ",".join(gpus[replica * each : (replica + 1) * each])}


def free_port(host: str) -> int:
    """Return a port of `host` that no process listens on.

    The port is outside the range from which outgoing connections take their ports.
    """
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise UserError(f"a server cannot be bound to {host}: {error.strerror}") from error
            return port
