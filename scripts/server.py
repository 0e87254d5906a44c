"""Take a lease on the server, so that it starts and passes its self-test, and write the attestation."""

import argparse
import json
from pathlib import Path

from draftstates import config
from draftstates.building import publish_text
from draftstates.capture_spec import CaptureSpec
from draftstates.cli import run
from draftstates.errors import UserError
from draftstates.exports.possible import check_exports
from draftstates.plan_file import check_run_folder, read_plan
from draftstates.room import check_room
from draftstates.server.command import attestation_path, server_settings
from draftstates.server.lease import lease


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    spec = CaptureSpec.from_plan(arguments.plan)
    check_exports(settings, spec=spec)  # named after the plan was made, perhaps
    check_missing_shards(arguments.plan, run_folder=arguments.output.parent)
    found = attestation_path(settings)
    found.parent.mkdir(parents=True, exist_ok=True)
    with lease(server_settings(settings, spec=spec, plan=arguments.plan)):
        try:
            attestation = json.loads(found.read_text())
        except OSError as error:
            raise UserError(f"{found}: the self-test left no attestation: {error.strerror}") from error
    if attestation["capture_key"] != spec.key:
        raise UserError(f"{found}: expected capture key {spec.key}, found {attestation['capture_key']}")
    publish_text(json.dumps(attestation, indent=1), arguments.output)


def check_missing_shards(plan: Path, *, run_folder: Path) -> None:
    """See once more that the disk has room: the plan may be of yesterday, and a server takes minutes of all GPUs to start."""
    planned = read_plan(plan)
    check_run_folder(planned, run_folder)
    shards = planned["shards"]
    check_room([shard["shard_id"] for shard in shards], [shard["bytes"] for shard in shards], run=run_folder, budget=None)


if __name__ == "__main__":
    run(main)
