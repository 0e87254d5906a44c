"""Print the accounting of the planned run: rows in, kept, skipped by reason, tokens, bytes, and where the manifest is."""

import argparse
import json
from pathlib import Path

from draftstates import cli
from draftstates.accounting import table
from draftstates.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    plan: Path = parser.parse_args().plan
    manifest = plan.parent / read(plan)["run"] / "manifest.json" if plan.exists() else None
    if manifest and manifest.exists():
        print(table(read(manifest), path=manifest))
    else:
        print("no manifest yet: only a part of the workflow was asked for")


def read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; run snakemake first") from error


if __name__ == "__main__":
    cli.run(main)
