"""The end of a server in a container, which is the same as on the host.

Whatever is killed, no process, mount or loop device of it is left.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from container_harness import traces
from lease_harness import FILES, Playground, announced, asked, eventually, find

from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings


def contained(play: Playground, image: Path, *stub: str) -> ServerSettings:
    """Return a stub server in the image, which sees its own script and the playground."""
    settings = play.settings(*stub, idle_seconds=600.0)
    shown = ["--bind", f"{FILES}:{FILES}:ro", "--bind", str(play.folder)]
    changes = {
        "command": ["{python}", *settings.command[1:]],
        "image": image,
        "image_args": shown,
        "scratch": play.folder / "scratch",
    }
    return settings.model_copy(update=changes)


def gone(play: Playground, image: Path) -> None:
    """Wait until nothing is left of the playground and the image.

    Processes count whatever their parent is: containers' processes have titles of their own.
    """
    words = (str(play.folder), image.name)
    eventually(
        lambda: not traces(*words) and not play.survivors(),
        within=15,
        what=f"nothing is left of {traces(*words)}",
    )


def test_a_server_in_an_image_serves_and_ends_when_idle(
    play: Playground, images: dict[str, Path]
) -> None:
    settings = contained(play, images["sglang"], "--helpers", "2")
    with lease(settings) as address:
        captures = asked(address)["pid"]
    # a server that answers takes its place
    with lease(settings.model_copy(update={"kind": "generate"})) as address:
        assert asked(address)["pid"] != captures
        assert [line for line in traces(images["sglang"].name) if "runtime parent" in line], (
            "it runs in no container"
        )
        os.kill(find(play, "draftstates.server.supervisor")[0], signal.SIGTERM)
    gone(play, images["sglang"])


def kill_owner(play: Playground, owner: subprocess.Popen) -> None:
    owner.kill()


def kill_supervisor(play: Playground, owner: subprocess.Popen) -> None:
    os.kill(find(play, "draftstates.server.supervisor")[0], signal.SIGKILL)


def kill_keeper(play: Playground, owner: subprocess.Popen) -> None:
    os.kill(find(play, "draftstates.server.keeper")[0], signal.SIGKILL)


def kill_runtime(play: Playground, owner: subprocess.Popen) -> None:
    """Kill Apptainer's own process, whose child is the server."""
    (parent,) = [line for line in traces("Apptainer runtime parent") if "sglang" in line]
    os.kill(int(parent.split()[1].rstrip(":")), signal.SIGKILL)


def kill_server(play: Playground, owner: subprocess.Popen) -> None:
    os.kill(play.starts()[0], signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_when_snakemake_ends(
    play: Playground, images: dict[str, Path], number: signal.Signals
) -> None:
    """KILL reaches Snakemake alone; the other signals reach all processes of its terminal."""
    run = play.snakemake(
        contained(play, images["sglang"], "--helpers", "1"), "--cores", "2", shards=2, seconds=600.0
    )
    announced(play, within=300)
    assert [line for line in traces(images["sglang"].name) if "runtime parent" in line]
    run.kill() if number == signal.SIGKILL else os.killpg(run.pid, number)
    run.wait(timeout=30)
    gone(play, images["sglang"])


@pytest.mark.parametrize(
    "end", [kill_owner, kill_supervisor, kill_keeper, kill_runtime, kill_server]
)
def test_nothing_is_left_of_a_container(
    play: Playground, images: dict[str, Path], end: Callable[[Playground, subprocess.Popen], None]
) -> None:
    """The server and its helpers ignore TERM."""
    settings = contained(play, images["sglang"], "--helpers", "2", "--stubborn")
    owner = subprocess.Popen(["sleep", "600"])
    client = play.client(settings, owner=owner)
    try:
        announced(play, within=300)
        before = set(find(play, "stub_server.py", "--host"))
        end(play, owner)
        # A client that still waits for its lease starts another server, as it should.
        eventually(
            lambda: not before & set(find(play, "stub_server.py", "--host")),
            within=20,
            what="server and keeper have ended",
        )
        client.terminate()
        client.wait(timeout=20)
        owner.kill()
        owner.wait()
        gone(play, images["sglang"])
    finally:
        client.kill()
        owner.kill()
