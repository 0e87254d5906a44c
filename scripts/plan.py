"""Plan the capture: cut the tokenised sources into shards, write each shard's tokens, and see that the disk has room."""

import argparse
import json
import sys
from pathlib import Path

from draftstates import config
from draftstates.building import publish_text
from draftstates.cli import run
from draftstates.exports.possible import check_exports
from draftstates.forecast import forecast
from draftstates.model import capture_spec, read_head, read_model
from draftstates.plan import PlanOptions, make_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--tokens", type=Path, required=True, nargs="+", help="<source>.parquet of each source, <source>.json beside it")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--results", type=Path, help="folder for the shards' tokens and the captures; that of --output where left out")
    parser.add_argument("--output", type=Path, required=True, help="plan.json")
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    read_head(arguments.model, final_norm=settings["capture"]["final_norm"])  # one that cannot be verified is refused before a GPU is taken
    spec = capture_spec(read_model(arguments.model), name=settings["model"]["name"], capture=settings["capture"])
    check_exports(settings, spec=spec)
    plan = make_plan(
        arguments.tokens,
        spec=spec,
        results=arguments.results or arguments.output.parent,
        options=PlanOptions(
            min_bytes=settings["shards"]["min_bytes"],
            max_bytes=settings["shards"]["max_bytes"],
            budget=settings["max_bytes"],
            exclude=settings["exclude"],
            deduplicate=settings["data"]["deduplicate"],
            **settings["checks"],
        ),
    )
    publish_text(json.dumps(plan, indent=1) + "\n", arguments.output)
    totals = plan["accounting"]["totals"]
    estimate = forecast(plan, settings["extract"]["tokens_per_second"])
    print(f"{totals['rows_in']:,} rows in, {totals['samples']:,} samples, {estimate}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
