"""Take a lease on the server, so that it starts and tests itself, and write the attestation."""

import argparse
from pathlib import Path

from draftstates import config
from draftstates.errors import UserError, run_command
from draftstates.exports.configured import check_exports
from draftstates.files import first_difference, publish_json, read_json
from draftstates.plan.room import check_missing
from draftstates.records import Plan
from draftstates.server.command import attestation_path, server_settings
from draftstates.server.lease import lease


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    plan = Plan.read(arguments.plan)
    spec = plan.capture
    # The exports may have been configured after the plan was made.
    check_exports(settings, spec=spec)
    plan.check_capture_folder(arguments.output.parent)
    check_missing(plan, capture_folder=arguments.output.parent, form=settings.storage.form)
    found = attestation_path(settings)
    found.parent.mkdir(parents=True, exist_ok=True)
    with lease(server_settings(settings, spec=spec, plan=arguments.plan)):
        attestation = read_json(found)
    if attestation is None:
        raise UserError(f"{found}: expected the self-test's attestation, found no such file")
    if difference := first_difference({"capture_key": spec.key}, attestation):
        raise UserError(f"{found}: {difference}")
    publish_json(attestation, arguments.output)


if __name__ == "__main__":
    run_command(main)
