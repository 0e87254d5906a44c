"""Hold a few captured samples to a plain Hugging Face forward pass, layer by layer, where the model fits this machine."""

import argparse
from pathlib import Path

from draftstates import parity, shards
from draftstates.capture_spec import torch_dtype
from draftstates.cli import run
from draftstates.model import read_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--samples", type=int, default=3, help="the first so many of the shard")
    parser.add_argument("--compute-dtype", choices=sorted(parity.TOLERANCES), required=True, help="what the server computed in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="load the model with the Python code in its folder")
    arguments = parser.parse_args()
    shard = shards.Shard(arguments.shard)
    num_layers = read_model(arguments.model).num_layers
    dtype = torch_dtype(arguments.compute_dtype)
    reference = parity.Reference(arguments.model, dtype=dtype, device=arguments.device, trust_remote_code=arguments.trust_remote_code)
    coarser = max((arguments.compute_dtype, shard.stored_dtype), key=parity.TOLERANCES.get)
    for index in range(min(arguments.samples, len(shard))):
        states = parity.named_states(shard, index, num_layers=num_layers)
        found = parity.compare(states, reference.states(shard.sample(index)["input_ids"]))
        for layer in found:
            neighbours = ", ".join(f"{name} {distance:.2g}" for name, distance in layer.neighbours.items())
            print(f"sample {index} {layer.layer}: median {layer.median:.2g}, worst {layer.worst:.2g}; neighbours {neighbours}")
        parity.judge(found, dtype=coarser, sample=shard.header.sample_ids[index])


if __name__ == "__main__":
    run(main)
