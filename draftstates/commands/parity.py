"""Comparison of a shard's first samples with a plain Hugging Face forward pass, layer by layer.

The whole model must fit this machine.
"""

import argparse
from pathlib import Path

from draftstates.model.folder import ModelFolder
from draftstates.shards import layout
from draftstates.spec import torch_dtype
from draftstates.verify import parity

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
        choices=sorted(parity.TOLERANCES),
        required=True,
        help="number format that the server computed in",
    )
    parser.add_argument("--device", default="cpu", help="where to compute, as torch names it")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="load the model with the Python code in its folder",
    )


def main(arguments: argparse.Namespace) -> None:
    """Compare the samples and print the distance of each layer."""
    shard = layout.Shard(arguments.shard)
    num_layers = ModelFolder(arguments.model).num_layers
    dtype = torch_dtype(arguments.compute_dtype)
    reference = parity.Reference(
        arguments.model,
        dtype=dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    coarser = max((arguments.compute_dtype, shard.stored_dtype), key=parity.TOLERANCES.get)
    for index in range(min(arguments.samples, len(shard))):
        states = parity.named_states(shard, index, num_layers=num_layers)
        found = parity.compare(states, reference.states(shard.sample(index)["input_ids"]))
        for layer in found:
            neighbours = ", ".join(
                f"{name} {distance:.2g}" for name, distance in layer.neighbours.items()
            )
            print(
                f"sample {index} {layer.layer}: median {layer.median:.2g}, worst {layer.worst:.2g};"
                f" neighbours {neighbours}"
            )
        parity.judge(found, dtype=coarser, sample=shard.header.sample_ids[index])
