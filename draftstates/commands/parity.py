"""Comparison of a shard's first samples with a Hugging Face forward pass of the checkpoint.

The weights are read layer by layer: about one layer of the model must fit this machine.
"""

import argparse
import dataclasses
from pathlib import Path

from draftstates.commands import add_json, print_json
from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.records import LayerParity
from draftstates.shards.layout import Shard
from draftstates.verify.parity.check import (
    chooses,
    compare_prompt,
    layers_alone,
    sample_prompt,
)
from draftstates.verify.parity.compare import COMPUTE_DTYPES, Limit, fault
from draftstates.verify.parity.streamed import NoReference, StreamedModel

EXAMPLE = (
    "draftstates parity --shard results/CAPTURE/shards/ID.safetensors --model MODEL"
    " --compute-dtype float32"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shard", type=Path, required=True, help="the shard's safetensors file")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--samples", type=int, default=3, help="how many of the shard's samples")
    parser.add_argument(
        "--compute-dtype",
        choices=COMPUTE_DTYPES,
        required=True,
        help="number format that the server computed in",
    )
    parser.add_argument("--device", default="cpu", help="where to compute, as torch names it")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="load the model with the Python code in its folder",
    )
    add_json(parser)


def main(arguments: argparse.Namespace) -> None:
    """Compare the samples and print the distance of each layer."""
    if arguments.samples < 1:
        raise UserError(f"--samples: expected at least 1, found {arguments.samples}")
    shard, model = Shard(arguments.shard), ModelFolder(arguments.model)
    limit = Limit.of(
        compute=arguments.compute_dtype,
        stored=shard.stored_dtype,
        quantization=model.quantization,
        smooth=not chooses(model.text),
    )
    try:
        reference = StreamedModel(
            model, device=arguments.device, trust_remote_code=arguments.trust_remote_code
        )
        compared = [
            _compared(shard, index, reference, limit, compute=arguments.compute_dtype)
            for index in range(min(arguments.samples, len(shard)))
        ]
    except NoReference as error:
        raise UserError(
            f"{arguments.model}: expected a model that transformers can load, found: {error}: add"
            " --trust-remote-code where the folder holds the model's own code; else leave parity"
            " out for this model"
        ) from error
    names = shard.header.sample_ids[: len(compared)]
    if arguments.json:
        print_json(
            [
                {"sample_id": name, "layers": [dataclasses.asdict(layer) for layer in layers]}
                for name, layers in zip(names, compared, strict=True)
            ]
        )
    else:
        for index, layers in enumerate(compared):
            _print(index, layers)
    for name, layers in zip(names, compared, strict=True):
        if faults := [what for layer in layers if (what := fault(layer))]:
            raise UserError(f"sample {name}, {faults[0]}")


def _compared(
    shard: Shard, index: int, reference: StreamedModel, limit: Limit, *, compute: str
) -> list[LayerParity]:
    """Return the distance of each captured layer of one sample."""
    prompt = sample_prompt(shard, index, num_layers=reference.num_layers)
    alone = layers_alone(prompt, limit, reference=reference, compute=compute)
    states = reference.states(prompt.input_ids, alone=alone)
    if states.reason:
        raise NoReference(states.reason)
    return compare_prompt(prompt, states, limit=limit, alone=alone)


def _print(index: int, layers: list[LayerParity]) -> None:
    for layer in layers:
        beside = ", ".join(f"{name} {distance:.2g}" for name, distance in layer.neighbours.items())
        print(
            f"sample {index} {layer.layer}: median {layer.median:.2g}, worst {layer.worst:.2g};"
            f" neighbours {beside}"
        )
