"""Write a drafter's vocabulary, out of a plan's tokens; nothing needs to be captured for it."""

import argparse
from pathlib import Path

from draftstates.cli import run
from draftstates.plan_file import read_plan
from draftstates.tokens.vocabulary import write_vocabulary
from draftstates.vocab import model_vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="results/plan.json; the shards' tokens lie in tokens/shards/ beside it")
    parser.add_argument("--draft-size", required=True, type=int, help="tokens of the drafter's vocabulary")
    parser.add_argument("--model", required=True, type=Path, help="folder of the model, for the size of its vocabulary")
    parser.add_argument("--output", required=True, type=Path, help="folder; the vocabulary gets one below it, named by its content")
    arguments = parser.parse_args()
    folder = write_vocabulary(
        read_plan(arguments.plan),
        shard_tokens=arguments.plan.parent / "tokens" / "shards",
        draft_size=arguments.draft_size,
        target_size=model_vocab_size(arguments.model),
        output=arguments.output,
    )
    print(folder)


run(main)
