"""Write the manifest and the table of samples, and print the accounting.

Both come from the plan and the results of verification.
"""

import argparse
from pathlib import Path

from draftstates.errors import run_command
from draftstates.paths import Results
from draftstates.records import Plan
from draftstates.report.accounting import table
from draftstates.shards.manifest import write_manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--plan",
        type=Path,
        required=True,
        help="plan.json; the shards' tokens lie beside it in tokens/shards",
    )
    parser.add_argument(
        "--capture-folder",
        type=Path,
        required=True,
        help="the capture's folder, with shards/ and verified/",
    )
    parser.add_argument("--parity", required=True, help="checks.parity: whether parity is required")
    parser.add_argument("--form", help="form of the shards; as captured where left out")
    parser.add_argument("--output", type=Path, required=True, help="manifest.json")
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    arguments = parser.parse_args()

    manifest = write_manifest(
        Plan.read(arguments.plan),
        tokens=Results.of_plan(arguments.plan).shard_tokens_folder,
        capture_folder=arguments.capture_folder,
        manifest=arguments.output,
        samples=arguments.samples,
        parity=arguments.parity,
        form=arguments.form,
    )
    print(table(manifest, path=arguments.output))


if __name__ == "__main__":
    run_command(main)
