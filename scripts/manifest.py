"""Write the manifest and the table of samples from the plan and what verification found, and print the accounting."""

import argparse
from pathlib import Path

from draftstates.accounting import table
from draftstates.cli import run
from draftstates.manifest import write_manifest
from draftstates.plan_file import read_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json; the shards' tokens lie beside it in tokens/shards")
    parser.add_argument("--run-dir", type=Path, required=True, help="the capture's folder, with shards/ and verified/")
    parser.add_argument("--output", type=Path, required=True, help="manifest.json")
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    arguments = parser.parse_args()

    manifest = write_manifest(
        read_plan(arguments.plan),
        tokens=arguments.plan.parent / "tokens" / "shards",
        run=arguments.run_dir,
        manifest=arguments.output,
        samples=arguments.samples,
    )
    print(table(manifest, path=arguments.output))


if __name__ == "__main__":
    run(main)
