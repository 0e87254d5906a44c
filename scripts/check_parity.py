"""Compare the self-test's rows of every layer with the checkpoint, and write the result.

Rows that differ are withdrawn with the attestation and the manifest: the next run starts another
server, and shards that the refused one captured enter no manifest.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch

from draftstates import config
from draftstates.errors import run_command
from draftstates.files import publish_json, publish_text, read_json
from draftstates.model.folder import ModelFolder
from draftstates.paths import Capture
from draftstates.records import Parity, Plan
from draftstates.report.parity import parity_page
from draftstates.server.command import server_settings
from draftstates.server.lease import lease
from draftstates.shards.selftest_rows import SelftestRows
from draftstates.verify.parity.check import Asked, ParityFailed, check_parity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--code", required=True, help="digest of the code that compares")
    parser.add_argument(
        "--hold-server",
        action="store_true",
        help="hold a lease meanwhile, because the extraction of shards waits for this step",
    )
    parser.add_argument("--threads", type=int, required=True, help="cores to use")
    parser.add_argument("--output", type=Path, required=True, help="parity.json")
    parser.add_argument("--html", type=Path, required=True, help="the result as a page")
    arguments = parser.parse_args()

    settings, plan = config.load(arguments.config), Plan.read(arguments.plan)
    capture = Capture(arguments.output.parent)
    plan.check_capture_folder(capture.folder)
    torch.set_num_threads(arguments.threads)
    present = capture.present_ids(settings.storage.form)
    missing = {shard.shard_id for shard in plan.shards} - present
    server = server_settings(settings, spec=plan.capture, plan=arguments.plan)
    held = lease(server) if arguments.hold_server and missing else contextlib.nullcontext()
    with held:
        found = _compare(settings, plan, capture, code=arguments.code)
    found.require(settings.checks.parity)
    _attest(capture, found)
    publish_text(parity_page(found), arguments.html)
    found.publish(arguments.output)
    print(f"parity: {found.result}, {found.seconds:.0f} s", file=sys.stderr)


def _compare(settings: config.Configuration, plan: Plan, capture: Capture, *, code: str) -> Parity:
    checks = settings.checks
    try:
        return check_parity(
            SelftestRows.read(capture.selftest_rows),
            spec=plan.capture,
            model=ModelFolder(settings.model.path),
            asked=Asked(tokens=checks.parity_tokens, layers=checks.parity_layers, code=code),
            trust_remote_code=settings.model.trust_remote_code,
        )
    except ParityFailed:
        for path in (capture.manifest, capture.server, capture.selftest_rows):
            path.unlink(missing_ok=True)
        raise


def _attest(capture: Capture, found: Parity) -> None:
    """Add the result to the server's attestation."""
    attestation = read_json(capture.server)
    if attestation is not None:
        publish_json({**attestation, "parity": found.document()}, capture.server)


if __name__ == "__main__":
    run_command(main)
