"""Print the accounting of the planned run: rows in, kept, skipped by reason, tokens, bytes, and where the manifest is."""

import argparse
import json
from pathlib import Path

from draftstates import cli
from draftstates.accounting import table
from draftstates.errors import UserError
from draftstates.plan_file import read_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    plan: Path = parser.parse_args().plan
    planned = read_plan(plan)
    manifest = plan.parent / planned["run"] / "manifest.json"
    if not manifest.exists():
        print("no manifest yet: only a part of the workflow was asked for")
        return
    try:
        content = json.loads(manifest.read_bytes())
        if [shard["shard_id"] for shard in content["shards"]] != [shard["shard_id"] for shard in planned["shards"]]:
            print(f"{manifest} is that of an earlier plan: only a part of the workflow was asked for")
            return
        print(table(content, path=manifest))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{manifest}: expected a manifest with its accounting, found {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    cli.run(main)
