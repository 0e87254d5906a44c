"""Commands in forks of a process that has loaded the libraries: each starts in a moment.

A run of the workflow starts an interpreter for Snakemake and for each job, most of whose time goes
into imports. Here a script of a workspace only hands its arguments to the process that `preloaded`
started. That process forks, and the fork runs the script that the workspace had. Its modules are
those of this repository, not the workspace's copies.
"""

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS = "DRAFTSTATES_TEST_PRELOADED"
_MODULES = (
    *("snakemake.cli", "snakemake.api", "snakemake.workflow", "snakemake.executors.local"),
    *("torch", "pandas", "pyarrow.parquet", "safetensors.torch", "captured"),
    *("draftstates.config", "draftstates.plan.plan", "draftstates.verify.verify"),
    *("draftstates.shards.manifest", "draftstates.exports.export", "draftstates.workflow"),
    *("draftstates.exports.vocabulary", "draftstates.tokens.tokenise"),
)
# what takes the place of a workspace's script, or of Snakemake
_HANDS_ON = """#!PYTHON
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as link:
    link.connect("\\0" + os.environ["ADDRESS"])
    request = {"script": SCRIPT, "arguments": sys.argv[1:], "folder": os.getcwd()}
    text = json.dumps({**request, "environment": dict(os.environ)}).encode()
    socket.send_fds(link, [len(text).to_bytes(8, "big")], [0, 1, 2])
    link.sendall(text)
    status = int(link.recv(16) or b"1")
# as a shell would say it
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


def hand_on(scripts: Path) -> None:
    """Have the scripts of a workspace run in forks of the preloaded process."""
    kept = scripts.with_name("preloaded-scripts")
    kept.mkdir(exist_ok=True)
    for script in scripts.glob("*.py"):
        script.rename(kept / script.name)
        script.write_text(_client(f"../{kept.name}/{script.name}"))


def _client(script: str | None) -> str:
    text = _HANDS_ON.replace("SCRIPT", repr(script)).replace("ADDRESS", ADDRESS)
    return text.replace("PYTHON", sys.executable)


def hand_on_snakemake(folder: Path) -> None:
    """Make a command `snakemake` that runs in a fork of the preloaded process."""
    folder.mkdir()
    command = folder / "snakemake"
    command.write_text(_client(None))
    command.chmod(0o755)


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """Start the process; it ends with the block."""
    address = f"draftstates-preloaded-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, __file__, address], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            process.terminate()


def snakemake(
    arguments: list[str], *, folder: Path, environment: dict[str, str]
) -> tuple[int, str]:
    """Run Snakemake in a fork of the process; return its status and its output.

    Args:
        arguments: Snakemake's arguments.
        folder: the working directory.
        environment: environment variables.
    """
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as link, open(reading, errors="replace") as output:
        link.connect("\0" + environment[ADDRESS])
        request = {"script": None, "arguments": arguments, "folder": str(folder)}
        text = json.dumps({**request, "environment": environment}).encode()
        with open(os.devnull) as nothing:
            socket.send_fds(
                link, [len(text).to_bytes(8, "big")], [nothing.fileno(), writing, writing]
            )
        os.close(writing)
        link.sendall(text)
        said = output.read()
        return int(link.recv(16) or b"1"), said


def _serve(address: str) -> None:
    for module in _MODULES:
        __import__(module)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0" + address)
    listening.listen(64)
    # ended forks are reaped by the system
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        link, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _answer(link)
        link.close()


def _answer(link: socket.socket) -> None:
    """Run what a client asks for in one more fork, and tell the client how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(link, 8, 3)
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += link.recv(1 << 16)
    job = os.fork()
    if job == 0:
        link.close()
        _run(json.loads(text), files)
    for file in files:
        os.close(file)
    _, status = os.waitpid(job, 0)
    with contextlib.suppress(OSError):
        link.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(request: dict[str, Any], files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    status = 1
    try:
        if script := request["script"]:
            path = Path(os.environ["DRAFTSTATES_SCRIPTS"], script)
            sys.argv = [str(path), *request["arguments"]]
            runpy.run_path(str(path), run_name="__main__")
        else:
            from snakemake.cli import main

            sys.argv = ["snakemake", *request["arguments"]]
            main(request["arguments"])
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # a run removes its folder when its process ends
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])
    _serve(sys.argv[1])
