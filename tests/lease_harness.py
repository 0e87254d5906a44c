"""Real runs of Snakemake with leases on stub servers, and the processes that they leave."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftstates.server.address import Address
from draftstates.server.processes import Process
from draftstates.server.run import RUN_FOLDER_VARIABLE, start_run
from draftstates.server.settings import ServerSettings

FILES = Path(__file__).parent / "lease"
MARK = "DRAFTSTATES_TEST_MARK"
_REPOSITORY = FILES.parents[1]


@dataclasses.dataclass
class Playground:
    """Working folder; every process started for it carries its path in the environment."""

    folder: Path
    # a folder that Python imports from before the repository
    first: Path | None = None

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, filter(None, (self.first, _REPOSITORY))))
        return {**os.environ, MARK: str(self.folder), "PYTHONPATH": path}

    def settings(self, *stub: str, **changes: object) -> ServerSettings:
        """Return settings of a stub server with the given extra arguments."""
        starts = str(self.folder / "starts")
        command = [
            sys.executable,
            str(FILES / "stub_server.py"),
            "--host",
            "{host}",
            "--port",
            "{port}",
            "--config",
            "{key_config}",
        ]
        defaults = {
            "state": self.folder / "state",
            "log": self.folder / "server.log",
            "idle_seconds": 3.0,
            "start_seconds": 30.0,
        }
        return ServerSettings(
            command=[*command, "--starts", starts, *stub], **{**defaults, **changes}
        )  # type: ignore[arg-type]

    def snakemake(
        self,
        settings: ServerSettings,
        *flags: str,
        shards: int,
        seconds: float = 0.2,
        fail: str = "none",
    ) -> subprocess.Popen:
        """Start Snakemake in a process group of its own, as a terminal would."""
        (self.folder / "settings.json").write_text(settings.to_json())
        config = {
            "shards": shards,
            "seconds": seconds,
            "fail": fail,
            "python": sys.executable,
            "client": FILES / "shard.py",
        }
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(FILES / "Snakefile"),
            "--workflow-profile",
            "none",
            *flags,
        ]
        return subprocess.Popen(
            [*command, "--config", *(f"{key}={value}" for key, value in config.items())],
            cwd=self.folder,
            env=self.environment(),
            stdout=open(self.folder / "snakemake.log", "ab"),
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def client(
        self,
        settings: ServerSettings,
        *,
        owner: subprocess.Popen | None = None,
        stdout: int | None = None,
    ) -> subprocess.Popen:
        """Start a process that holds a lease for ten minutes.

        Args:
            owner: the process whose end ends the client's run; None for the run of this process.
        """
        (self.folder / "settings.json").write_text(settings.to_json())
        environment = self.environment()
        if owner:
            run = start_run(settings.state, owner=Process.of(owner.pid))
            environment[RUN_FOLDER_VARIABLE] = str(run.folder)
            # this process's own leases are no part of the owner's run
            del os.environ[RUN_FOLDER_VARIABLE]
        return subprocess.Popen(
            [sys.executable, str(FILES / "shard.py"), "out.txt", "--seconds=600", "--fail=none"],
            cwd=self.folder,
            env=environment,
            stdout=stdout,
            text=True,
        )

    def starts(self) -> list[int]:
        """Return the pids of the servers started so far."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / "starts").read_text().split()]
        return []

    def servers_asked(self) -> dict[str, int]:
        """Return the pid of the server that answered, for each output."""
        return {
            path.stem: json.loads(path.read_text())["pid"]
            for path in (self.folder / "out").glob("*.txt")
        }

    def outputs(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "out").glob("*.txt"))

    def said(self) -> str:
        """Return the output of Snakemake up to now."""
        return (self.folder / "snakemake.log").read_text()

    def survivors(self) -> list[str]:
        """Return the command lines of the living processes that carry the mark."""
        found = []
        mark = f"{MARK}={self.folder}\0".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                    found.append(
                        f"{entry.name}"
                        f" {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
                    )
        return found

    def end(self) -> None:
        for line in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def eventually(look: Callable[[], Any], *, within: float, what: str) -> Any:
    """Return the first truthy value of `look()`; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.1)
    return value


def find(playground: Playground, *words: str) -> list[int]:
    """Return the pids of the playground's processes whose command line holds all of the words."""
    return [
        int(line.split()[0])
        for line in playground.survivors()
        if all(word in line for word in words)
    ]


def announced(play: Playground, *, within: float = 20) -> None:
    """Wait until a server has an address for clients."""
    eventually(lambda: addresses(play.folder), within=within, what="the server is announced")


def addresses(folder: Path) -> list[Path]:
    """Return the address files, in a folder with the state folder, of servers for clients."""
    return list(folder.glob("*/run-*/servers/*/address.json"))


def leased(play: Playground, count: int, *, within: float = 20) -> None:
    """Wait until `count` jobs of Snakemake have said that they have a server."""

    def look() -> bool:
        logs = [path.read_text() for path in play.folder.glob("logs/*.log")]
        return sum("leased" in log for log in logs) >= count

    eventually(look, within=within, what=f"{count} jobs have a server")


def ended(play: Playground, *, within: float = 10) -> None:
    """Wait until no process of the playground is left."""
    eventually(lambda: not play.survivors(), within=within, what="everything has ended")


def asked(address: Address) -> dict[str, Any]:
    """Return what a leased stub server says of itself."""
    return json.loads(ask(address.url, address.api_key))


def ask(url: str, key: str | None) -> str:
    """Return the answer of a stub server as text."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    return urllib.request.urlopen(request, timeout=5).read().decode()
