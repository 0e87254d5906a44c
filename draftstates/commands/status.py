"""Progress of a run.

The command shows the prompts that are answered, then the shards captured, running and failed, the
tokens per second of each server, and the time and disk space left. It reads files only, so it works
from any terminal or node that sees the results folder.
"""

import argparse
import sys
import time

from rich.console import Console
from rich.live import Live

from draftstates.commands import add_json, add_results, print_json
from draftstates.paths import Results
from draftstates.report.answering import answering, answering_table, as_documents
from draftstates.report.status import as_document, look, view

EXAMPLE = "draftstates status --results results --once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    parser.add_argument("--once", action="store_true", help="print the present state and end")
    add_json(parser)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")


def main(arguments: argparse.Namespace) -> None:
    """Print the state once, or keep it on the terminal until the run is complete."""
    plan = Results(arguments.results).plan
    if arguments.json:
        answers = as_documents(answering(arguments.results))
        # the first answers come before the plan
        is_unplanned = answers and not plan.exists()
        state = {"done": False} if is_unplanned else as_document(look(arguments.results))
        if answers:
            state |= {"done": False, "answers": answers}
        print_json(state)
        return
    if arguments.once or not sys.stdout.isatty():
        sources = answering(arguments.results)
        Console().print(answering_table(sources) if sources else view(look(arguments.results)))
        return
    with Live(f"waiting for {plan}", auto_refresh=False) as live:
        before = None
        while before is None or not before.is_done:
            if sources := answering(arguments.results):
                live.update(answering_table(sources), refresh=True)
            elif plan.exists():
                status = look(arguments.results)
                live.update(view(status, before), refresh=True)
                before = status
            time.sleep(arguments.every)
