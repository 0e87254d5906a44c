"""Print the accounting of the planned run: rows in, kept, skipped by reason, tokens, bytes, and where the manifest is."""

import argparse
import json
from pathlib import Path

from draftstates import cli
from draftstates.accounting import table
from draftstates.errors import UserError
from draftstates.plan import read_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    plan: Path = parser.parse_args().plan
    manifest = plan.parent / read_plan(plan)["run"] / "manifest.json"
    if not manifest.exists():
        print("no manifest yet: only a part of the workflow was asked for")
        return
    try:
        print(table(json.loads(manifest.read_bytes()), path=manifest))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{manifest}: expected a manifest with its accounting, found {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    cli.run(main)
