"""Stands in for `scripts/server.py`: an attestation, while it holds a lease on a stub server."""

import argparse
from pathlib import Path

from draftstates.errors import run_command
from draftstates.files import publish_json
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("config", "plan", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    with lease(ServerSettings.from_json(Path("settings.json").read_text())):
        publish_json({"engine": "none"}, arguments.output)


run_command(main)
