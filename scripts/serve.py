"""Keep the configured server up until Ctrl-C, for a look at it; runs of the workflow started meanwhile use it too."""

import argparse
from pathlib import Path

from draftstates import config
from draftstates.cli import run
from draftstates.server.command import attestation_path, server_settings
from draftstates.server.hold import hold
from draftstates.shards import CaptureSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    arguments = parser.parse_args()
    settings = config.load(arguments.config)
    attestation_path(settings).parent.mkdir(parents=True, exist_ok=True)
    hold(server_settings(settings, spec=CaptureSpec.from_plan(arguments.plan), plan=arguments.plan))


if __name__ == "__main__":
    run(main)
