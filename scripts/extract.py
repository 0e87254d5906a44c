"""Make one shard through the leased server: `--output` and its two companions.

Rows that earlier shards hold are copied.
"""

import argparse
import json
from pathlib import Path

from draftstates import config
from draftstates.errors import run_command
from draftstates.extract import extract
from draftstates.extract.client import Endpoint
from draftstates.paths import Capture
from draftstates.plan.room import check_free, check_missing
from draftstates.plan.shard_tokens import read_tokens
from draftstates.records import Plan
from draftstates.server.address import server_info
from draftstates.server.command import server_settings
from draftstates.server.lease import lease
from draftstates.shards.selftest_rows import read_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--shard-id", required=True)
    parser.add_argument(
        "--tokens", type=Path, required=True, help="the shard's tokens, as the plan wrote them"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the shard; prefix recaptures and receipts appear beside it",
    )
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    plan = Plan.read(arguments.plan)
    capture = Capture.of_shard(arguments.output)
    plan.check_capture_folder(capture.folder)
    spec = plan.capture
    tokens = read_tokens(arguments.tokens, shard_id=arguments.shard_id)
    options = extract.ExtractOptions(**dict(settings.extract), **dict(settings.checks))
    check_free(arguments.output.parent, plan.shard(arguments.shard_id).bytes)
    check_missing(plan, capture_folder=capture.folder, form=settings.storage.form)
    server = server_settings(settings, spec=spec, plan=arguments.plan)
    with lease(server) as address:
        endpoint = Endpoint(
            url=address.url,
            api_key=address.api_key,
            root=settings.results.resolve(),
            fresh_namespace=address.launcher == "external" or settings.capture.reuse_prefixes,
            reuse_prefixes=settings.capture.reuse_prefixes,
            server=address.server,
        )
        figures = extract.extract_shard(
            tokens,
            spec=spec,
            endpoint=endpoint,
            engine=server_info(address.url, api_key=address.api_key)["version"],
            options=options,
            output=arguments.output.resolve(),
            planned=[shard.shard_id for shard in plan.shards],
            server_image=(
                server.image.name if server.image and server.launcher != "external" else None
            ),
            selftest=read_id(capture.selftest_rows),
        )
    print(json.dumps({"shard_id": tokens.shard_id, **figures}))


if __name__ == "__main__":
    run_command(main)
