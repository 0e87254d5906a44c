"""Write a drafter's vocabulary from a plan's tokens; it needs no capture."""

import argparse
from pathlib import Path

from draftstates.errors import run_command
from draftstates.exports.vocabulary import write_vocabulary
from draftstates.model.folder import ModelFolder
from draftstates.paths import Results
from draftstates.records import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "plan",
        type=Path,
        help="results/plan.json; the shards' tokens lie in tokens/shards/ beside it",
    )
    parser.add_argument(
        "--draft-size", required=True, type=int, help="tokens of the drafter's vocabulary"
    )
    parser.add_argument(
        "--model",
        required=True,
        type=Path,
        help="folder of the model, for the size of its vocabulary",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        help="folder; the vocabulary gets one below it, named by its content",
    )
    arguments = parser.parse_args()
    folder = write_vocabulary(
        Plan.read(arguments.plan),
        shard_tokens=Results.of_plan(arguments.plan).shard_tokens_folder,
        draft_size=arguments.draft_size,
        target_size=ModelFolder(arguments.model).vocab_size,
        output=arguments.output,
    )
    print(folder)


if __name__ == "__main__":
    run_command(main)
