"""Find a source's data set of the hub in the local cache, or fetch it, and write which it is."""

import argparse
from pathlib import Path

from draftstates.config import load
from draftstates.errors import run_command
from draftstates.tokens.hub_data import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="name of the source in data.sources")
    parser.add_argument("--config", required=True, type=Path, help="configuration")
    parser.add_argument("--output", required=True, type=Path, help="record to write")
    arguments = parser.parse_args()
    write_record(load(arguments.config).data.source(arguments.source).hub, arguments.output)


if __name__ == "__main__":
    run_command(main)
