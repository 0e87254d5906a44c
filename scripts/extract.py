"""Make one shard, through the leased server and from shards before it: `--output` and its two companions."""

import argparse
import json
from pathlib import Path

from draftstates import config, extract
from draftstates.capture_spec import CaptureSpec
from draftstates.cli import run
from draftstates.client import Endpoint
from draftstates.plan_file import check_run_folder, read_plan
from draftstates.room import check_free
from draftstates.server.command import server_settings
from draftstates.server.engine import server_info
from draftstates.server.lease import lease
from draftstates.shard_tokens import read_tokens
from draftstates.shards import shard_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--shard-id", required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="the shard's tokens, as the plan wrote them")
    parser.add_argument("--output", type=Path, required=True, help="the shard; probe and receipts appear beside it")
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    plan = read_plan(arguments.plan)
    check_run_folder(plan, arguments.output.parent.parent)
    spec = CaptureSpec.from_fields(plan["capture"])
    tokens = read_tokens(arguments.tokens, shard_id=arguments.shard_id)
    options = extract.ExtractOptions(
        tokens_in_flight=settings["extract"]["tokens_in_flight"],
        probe_fraction=settings["checks"]["probe_fraction"],
        probe_minimum=settings["checks"]["probe_minimum"],
        reuse=settings["extract"]["reuse"],
    )
    check_free(arguments.output.parent, shard_bytes(spec=spec, samples=len(tokens.sample_ids), tokens=len(tokens.input_ids)))
    server = server_settings(settings, spec=spec, plan=arguments.plan)
    with lease(server) as address:
        endpoint = Endpoint(
            url=address.url,
            api_key=address.api_key,
            root=Path(settings["results"]).resolve(),
            fresh_namespace=address.launcher == "external",
        )
        figures = extract.extract_shard(
            tokens,
            spec=spec,
            endpoint=endpoint,
            engine=server_info(address.url, api_key=address.api_key)["version"],
            options=options,
            output=arguments.output.resolve(),
            planned=[shard["shard_id"] for shard in plan["shards"]],
            server_image=server.image.name if server.image and server.launcher != "external" else None,
        )
    print(json.dumps({"shard_id": tokens.shard_id, **figures}))


if __name__ == "__main__":
    run(main)
