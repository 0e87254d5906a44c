"""Make a run's shards compact, beside them: e4m3 instead of 16 bits, and no final state where no loss reads one."""

import argparse
import sys
from pathlib import Path

from draftstates.cli import run
from draftstates.compact import compact_manifest
from draftstates.storage import Storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for the compact shards and their manifest.json")
    parser.add_argument(
        "--fp8", choices=("layers", "all"), help="e4m3 with a scale per row and layer: of the layers, or of the final state too"
    )
    parser.add_argument("--supervised-rows", action="store_true", help="keep final states of supervised rows and their neighbours only")
    parser.add_argument("--keep-top-token", type=Path, metavar="MODEL", help="with --fp8 all: store in full what would change its pick")
    arguments = parser.parse_args()

    keep = arguments.keep_top_token is not None
    storage = Storage(fp8=arguments.fp8, supervised_rows=arguments.supervised_rows, keep_top_token=keep)
    document = compact_manifest(arguments.manifest, arguments.output, storage, arguments.keep_top_token)
    tokens, size = (sum(shard[name] for shard in document["shards"]) for name in ("tokens", "bytes"))
    print(f"{len(document['shards']):,} shards, {size / tokens:,.1f} bytes a token, in {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
