"""Show what a run is doing: shards captured, running and failed, tokens per second of each server, time and disk left.

It reads files only, so it works from any terminal or node that sees the results folder.
"""

import argparse
import sys
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
    plan = arguments.results / "plan.json"
    if arguments.once or not sys.stdout.isatty():
        Console().print(view(look(arguments.results)))
        return
    with Live(f"waiting for {plan}", auto_refresh=False) as live:
        before = None
        while before is None or not before.is_done:
            if plan.exists():
                status = look(arguments.results)
                live.update(view(status, before), refresh=True)
                before = status
            time.sleep(arguments.every)


if __name__ == "__main__":
    cli.run(main)
