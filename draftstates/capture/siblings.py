"""Watch over data parallel ranks: the server ends when one of its ranks was killed.

SGLang watches the children of its main process. Data parallel ranks are grandchildren: when the
kernel kills one, SGLang does not notice, the server looks healthy, and its requests wait until the
client gives up.
"""

import contextlib
import signal
import sys
import threading
import time

import psutil

# The start of the name of a rank's process; the kernel cuts the name.
_RANK = "sglang::sch"


def watch(*, seconds: float = 5.0) -> None:
    """Start a thread that ends the server when another of its ranks is gone.

    Each rank calls it.

    Args:
        seconds: time between two looks.
    """
    controller = psutil.Process().parent()
    threading.Thread(
        target=_watch,
        args=(controller, controller.parent(), seconds),
        name="draftstates-siblings",
        daemon=True,
    ).start()


def _watch(controller: psutil.Process, server: psutil.Process, seconds: float) -> None:
    # A missing process means that the server is ending.
    with contextlib.suppress(psutil.NoSuchProcess):
        seen: set[int] = set()
        while not (gone := seen - (ranks := _ranks(controller))):
            seen = ranks
            time.sleep(seconds)
        print(
            f"draftstates: rank {', '.join(map(str, sorted(gone)))} was killed; the server ends",
            file=sys.stderr,
            flush=True,
        )
        # SGLang's own signal for this case: the main process ends the whole tree.
        server.send_signal(signal.SIGQUIT)


def _ranks(controller: psutil.Process) -> set[int]:
    """Return the process ids of the ranks that live."""
    found = set()
    for child in controller.children():
        try:
            if child.name().startswith(_RANK) and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
