"""A server as a tree of processes."""

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
from draftstates.errors import UserError
from draftstates.server.files import open_log, tail
from draftstates.server.processes import die_with_parent
from draftstates.server.settings import ServerSettings

LOOPBACK = "127.0.0.1"
_PORTS = (15000, 32000)  # below Linux's ephemeral range: a model loads for minutes before its server binds the port
_THREADS = (
    "OMP_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_GPUS = "CUDA_VISIBLE_DEVICES"


class LocalServer:
    """One server as a process of this machine, on a free port of `host`.

    Args:
        environment: variables added to those of the settings.
        held: descriptors that stay open as long as any process of the server may be left, such as locks.
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
        values = {"{host}": host, "{port}": str(port), "{key_config}": str(key_config), "{replica}": str(replica)}
        command = server_command(settings, values)
        if settings.image and settings.scratch:
            settings.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        output = open_log(self.log)
        os.write(output, f"--- {time.strftime('%F %T')} {command}\n".encode())
        self._log_start = os.fstat(output).st_size
        self._report, report = os.pipe()
        os.set_blocking(self._report, False)
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "draftstates.server.keeper", str(settings.stop_seconds), str(report), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**_own_environment(settings), **settings.env, **(environment or {})},
            pass_fds=(*held, report),  # the keeper holds them as well; the server gets none
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        os.close(output)
        os.close(report)

    def death(self) -> str | None:
        """How the server ended, or None while it runs. What it has left behind may still be ending."""
        try:
            reported = os.read(self._report, 16)
        except BlockingIOError:
            return None
        code = int(reported) if reported else self._keeper.wait()  # nothing: the keeper itself was killed
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def end(self) -> None:
        """Begin to end the whole tree."""
        self._keeper.terminate()

    def is_gone(self) -> bool:
        """Whether the whole tree has ended."""
        if self._keeper.poll() is None:
            return False
        os.close(self._report)
        return True

    @property
    def lost_its_keeper(self) -> bool:
        """Whether the keeper was killed, so that what is left of the tree falls to this process."""
        return (self._keeper.poll() or 0) < 0

    def last_lines(self) -> str:
        """The end of what this server, not an earlier one, wrote to its log."""
        return tail(self.log, start=self._log_start)


def _own_environment(settings: ServerSettings) -> dict[str, str]:
    """This process's, but for what is meant for others.

    Snakemake limits a step of one thread to one by variables, and the step that happens to start the server is no measure of the
    server. Of what is meant for the containers of steps a server's image needs nothing: it has all but what its binds show.
    """
    own = {name: value for name, value in os.environ.items() if name not in _THREADS}
    if not settings.image:
        return own
    own = {name: value for name, value in own.items() if name not in STEP_VARIABLES}
    return {**own, "APPTAINERENV_PYTHONPATH": ""}  # that of this process names folders of the host


def server_command(settings: ServerSettings, values: dict[str, str]) -> list[str]:
    """argv of a server on the host, through Apptainer where it has an image."""
    if settings.image is None:
        return fill(settings.command, {**values, "{python}": sys.executable})
    contained = ["--contain", *(["--workdir", str(settings.scratch)] if settings.scratch else [])]
    command = fill(settings.command, {**values, "{python}": "python"})
    return ["apptainer", "exec", *contained, *settings.image_args, str(settings.image), *command]


def fill(command: list[str], values: dict[str, str]) -> list[str]:
    """`command` with each placeholder replaced; other braces stay, since arguments may be JSON."""
    filled = []
    for argument in command:
        for name, value in values.items():
            argument = argument.replace(name, value)
        filled.append(argument)
    return filled


def gpus_of(settings: ServerSettings, replica: int) -> dict[str, str]:
    """Variables that give a local replica GPUs of its own, out of those that this process sees.

    Raises:
        UserError: there are too few.
    """
    each = settings.gpus_each
    if not each or settings.replicas == 1:
        return {}
    visible = os.environ.get(_GPUS)
    gpus = visible.split(",") if visible else [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if len(gpus) < each * settings.replicas:
        needed = f"{settings.replicas} replicas of {each} GPUs"
        raise UserError(f"server.replicas: {needed} need {each * settings.replicas}, found {len(gpus)} ({','.join(gpus)})")
    return {_GPUS: ",".join(gpus[replica * each : (replica + 1) * each])}


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on, outside the range that outgoing connections take theirs from."""
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
