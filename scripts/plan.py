"""Plan the capture: cut the tokenised sources into shards and write each shard's tokens.

Check that the disk has room for the capture.
"""

import argparse
import sys
from pathlib import Path

from draftstates import config
from draftstates.errors import run_command
from draftstates.exports.configured import check_exports
from draftstates.model.context import server_context
from draftstates.model.digest import configured_capture
from draftstates.model.folder import ModelFolder, check_model
from draftstates.model.head import read_head
from draftstates.plan.plan import PlanOptions, make_plan
from draftstates.plan.room import forecast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument(
        "--tokens",
        type=Path,
        required=True,
        nargs="+",
        help="<source>.parquet of each source, <source>.json beside it",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for the shards' tokens and the captures; that of --output where left out",
    )
    parser.add_argument("--output", type=Path, required=True, help="plan.json")
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    model = ModelFolder(arguments.model)
    # A model whose states cannot be captured or verified is refused before a GPU is taken. The
    # workflow checks it first, unless a rule makes the model.
    check_model(settings)
    read_head(model, final_norm=settings.capture.final_norm)
    spec = configured_capture(settings, model)
    check_exports(settings, spec=spec)
    plan = make_plan(
        arguments.tokens,
        spec=spec,
        results=arguments.results or arguments.output.parent,
        options=PlanOptions(
            **dict(settings.shards),
            **dict(settings.checks),
            budget=settings.max_bytes,
            exclude=settings.exclude,
            deduplicate=settings.data.deduplicate,
            context_length=server_context(settings),
            form=settings.storage.form,
        ),
    )
    plan.publish(arguments.output)
    totals = plan.accounting.totals
    estimate = forecast(plan, settings.extract.tokens_per_second)
    print(f"{totals.rows_in:,} rows in, {totals.samples:,} samples, {estimate}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main, lasting=True)
