"""Smaller copy of a capture's shards.

Numbers can be stored as e4m3 instead of 16 bits, and final states that no loss reads can be left
out.
"""

import argparse
import sys
from pathlib import Path

from draftstates.commands import add_json, print_json
from draftstates.exports.compact import compact_manifest
from draftstates.shards.compact import Storage

EXAMPLE = (
    "draftstates compact --manifest results/CAPTURE/manifest.json --output compact --fp8 layers"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for the compact shards and their manifest.json",
    )
    parser.add_argument(
        "--fp8",
        choices=("layers", "all"),
        help="e4m3 with a scale per row and layer: of the layers, or of the final state too",
    )
    parser.add_argument(
        "--supervised-rows",
        action="store_true",
        help="keep final states of supervised rows and their neighbours only",
    )
    parser.add_argument(
        "--keep-top-token",
        type=Path,
        metavar="MODEL",
        help="with --fp8 all: store in full what would change its pick",
    )
    add_json(parser)


def main(arguments: argparse.Namespace) -> None:
    """Write the copy and print its size."""
    keep = arguments.keep_top_token is not None
    storage = Storage(
        fp8=arguments.fp8, supervised_rows=arguments.supervised_rows, keep_top_token=keep
    )
    document = compact_manifest(
        arguments.manifest, arguments.output, storage, arguments.keep_top_token
    )
    tokens, size = (
        sum(getattr(shard, name) for shard in document.shards) for name in ("tokens", "bytes")
    )
    if arguments.json:
        counts = {"shards": len(document.shards), "tokens": tokens, "bytes": size}
        print_json({"output": arguments.output, **counts})
        return
    print(
        f"{len(document.shards):,} shards, {size / tokens:,.1f} bytes a token, in"
        f" {arguments.output}",
        file=sys.stderr,
    )
