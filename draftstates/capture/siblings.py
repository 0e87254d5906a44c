"""Ends a data parallel server when one of its ranks was killed.

SGLang watches the children of its main process. Data parallel ranks are grandchildren: of one that the kernel killed nobody hears, the
server looks well, and what it was sent waits until the client gives up.
"""

import contextlib
import signal
import sys
import threading
import time

import psutil

_RANK = "sglang::sch"  # how a rank's process is named; the kernel cuts the name


def watch(*, seconds: float = 5.0) -> None:
    """From a thread of its own, end the server when another rank of it is gone. Called in each rank."""
    controller = psutil.Process().parent()
    threading.Thread(target=_watch, args=(controller, controller.parent(), seconds), name="draftstates-siblings", daemon=True).start()


def _watch(controller: psutil.Process, server: psutil.Process, seconds: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # the server is ending
        seen: set[int] = set()
        while not (gone := seen - (ranks := _ranks(controller))):
            seen = ranks
            time.sleep(seconds)
        print(f"draftstates: rank {', '.join(map(str, sorted(gone)))} was killed; the server ends", file=sys.stderr, flush=True)
        server.send_signal(signal.SIGQUIT)  # SGLang's own signal for it: the main process ends the whole tree


def _ranks(controller: psutil.Process) -> set[int]:
    """Process ids of the ranks that live."""
    found = set()
    for child in controller.children():
        try:
            if child.name().startswith(_RANK) and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
