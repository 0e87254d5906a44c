"""Export of a manifest in the format that a trainer reads.

The trainers are speculators, SpecForge, Model-Optimizer, NeMo Automodel and DeepSpec.
"""

import argparse
import sys
from pathlib import Path

from draftstates.commands import add_json, print_json
from draftstates.exports.common import Options
from draftstates.exports.export import EXPORTED, export_manifest
from draftstates.spec import STORED_DTYPES, torch_dtype

EXAMPLE = (
    "draftstates export --manifest results/CAPTURE/manifest.json --trainer specforge --output out"
)


def layer_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--trainer", choices=EXPORTED, required=True)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder; it is replaced when the export is complete",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of the captured model, for its final norm and the size of its vocabulary",
    )
    parser.add_argument(
        "--layers",
        type=layer_list,
        help="r_k to export, such as 2,15,27; all but r_N where left out",
    )
    parser.add_argument(
        "--final-norm",
        choices=("pre_norm", "post_norm"),
        help="what the trainer reads, where left out",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(STORED_DTYPES),
        help="number format of the states; as stored where left out",
    )
    parser.add_argument(
        "--draft-vocab-size", type=int, help="write a vocabulary mapping of this size"
    )
    parser.add_argument(
        "--target-vocab-size", type=int, help="the model's, where it is not that of its config.json"
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        help="tokens that NeMo Automodel's samples are padded to; those of the longest one where"
        " left out",
    )
    parser.add_argument(
        "--target-probs-topk",
        type=int,
        help="probabilities to keep of each of NeMo Automodel's tokens; all where left out",
    )
    parser.add_argument(
        "--target-model",
        help="the model's name in the trainer's configuration (DeepSpec compares it)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "validation"),
        help="only these samples, chosen by their own ids",
    )
    parser.add_argument("--validation-fraction", type=float, default=0.05)
    add_json(parser)


def main(arguments: argparse.Namespace) -> None:
    """Write the export and print its summary."""
    summary = export_manifest(
        arguments.manifest,
        arguments.output,
        name=arguments.trainer,
        residual_layers=arguments.layers,
        final_norm=arguments.final_norm,
        model_folder=arguments.model,
        split=arguments.split,
        validation_fraction=arguments.validation_fraction,
        options=Options(
            dtype=torch_dtype(arguments.dtype) if arguments.dtype else None,
            draft_vocab_size=arguments.draft_vocab_size,
            target_vocab_size=arguments.target_vocab_size,
            target_model=arguments.target_model,
            seq_length=arguments.seq_length,
            target_probs_topk=arguments.target_probs_topk,
        ),
    )
    if arguments.json:
        print_json({"output": arguments.output, **summary})
        return
    layers = ", ".join(f"{ours} as {theirs}" for ours, theirs in summary["layers"].items())
    print(
        f"{summary['samples']:,} samples, {summary['tokens']:,} tokens in {arguments.output}",
        file=sys.stderr,
    )
    print(
        f"layers: {layers} ({summary['layers_are_counted']}); final state: {summary['final_norm']}",
        file=sys.stderr,
    )
    print(
        f"{summary['files_written']:,} files written and read back, {summary['files_reused']:,} as"
        " they were",
        file=sys.stderr,
    )
