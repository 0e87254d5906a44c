"""What a supervisor starts."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from draftstates.server.files import open_log, tail
from draftstates.server.processes import die_with_parent
from draftstates.server.settings import ServerSettings

_LOOPBACK = "127.0.0.1"
_PORTS = (15000, 32000)  # below Linux's ephemeral range: a model loads for minutes before its server binds the port


class LocalServer:
    """One server as a process of this machine, on a free port of the loopback interface."""

    def __init__(self, settings: ServerSettings, *, replica: int, key_config: Path, tree_lock: int) -> None:
        self.log = settings.log if settings.replicas == 1 else settings.log.with_suffix(f".{replica}{settings.log.suffix}")
        port = _free_port()
        self.url = f"http://{_LOOPBACK}:{port}"
        values = {"{port}": str(port), "{key_config}": str(key_config), "{replica}": str(replica)}
        command = fill(_in_image(settings), values)
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
            env={**os.environ, **settings.env},
            pass_fds=(tree_lock, report),  # the keeper holds the lock as well; the server gets neither
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

    def last_lines(self) -> str:
        """The end of what this server, not an earlier one, wrote to its log."""
        return tail(self.log, start=self._log_start)


def fill(command: list[str], values: dict[str, str]) -> list[str]:
    """`command` with each placeholder replaced; other braces stay, since arguments may be JSON."""
    filled = []
    for argument in command:
        for name, value in values.items():
            argument = argument.replace(name, value)
        filled.append(argument)
    return filled


def _in_image(settings: ServerSettings) -> list[str]:
    if settings.image is None:
        return settings.command
    return ["apptainer", "exec", *settings.image_args, str(settings.image), *settings.command]


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
            return port
