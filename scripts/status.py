"""Show what a run is doing: shards captured, running and failed, tokens per second of each server, time and disk left.

It reads files only, so it works from any terminal or node that sees the results folder.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from draftstates import cli
from draftstates.status import look, view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="`results` of the configuration")
    parser.add_argument("--once", action="store_true", help="print the present state and end")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    arguments = parser.parse_args()
    before = look(arguments.results)
    if arguments.once:
        Console().print(view(before))
        return
    with Live(view(before), auto_refresh=False) as live:
        while True:
            time.sleep(arguments.every)
            status = look(arguments.results)
            live.update(view(status, before), refresh=True)
            before = status


if __name__ == "__main__":
    cli.run(main)
