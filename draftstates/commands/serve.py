"""The configured server, kept up until Ctrl-C; or, with --print, its command.

Run the printed command where this machine starts no server. A server that is kept up says with
which variable a run of the workflow uses it.
"""

import argparse
import shlex
from pathlib import Path

from draftstates import config
from draftstates.records import Plan
from draftstates.server.command import attestation_path, server_settings
from draftstates.server.lease import hold
from draftstates.server.local import server_command

EXAMPLE = "draftstates serve --config results/config/DIGEST.yaml --plan results/plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument(
        "--print",
        type=Path,
        metavar="KEY_YAML",
        help="print the command; the file says `api-key: <key>`",
    )
    # clients of a server that a person starts are on other nodes, and need its key
    everywhere = "0.0.0.0"  # noqa: S104
    parser.add_argument(
        "--host", default=everywhere, help="address to bind, in the printed command"
    )
    parser.add_argument(
        "--port", type=int, default=30000, help="port to bind, in the printed command"
    )


def main(arguments: argparse.Namespace) -> None:
    """Print the server's command, or keep the server up."""
    configured = config.load(arguments.config)
    settings = server_settings(
        configured, spec=Plan.read(arguments.plan).capture, plan=arguments.plan
    )
    if arguments.print:
        command = server_command(
            settings,
            host=arguments.host,
            port=arguments.port,
            key_config=arguments.print.resolve(),
        )
        variables = [f"{name}={value}" for name, value in settings.env.items()]
        print(shlex.join(["env", *variables, *command]))
    else:
        attestation_path(configured).parent.mkdir(parents=True, exist_ok=True)
        hold(settings)
