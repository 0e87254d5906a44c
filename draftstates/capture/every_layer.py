"""Rows of every layer, which a self-test request leaves beside the shard that it fills.

An ordinary request writes the captured layers alone. Parity and the comparison of servers need all
of them, of a few rows: the first and the last ones of each prompt.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from draftstates.capture.files import place_of
from draftstates.extract.protocol import SELF_TEST, Destination, kept_positions

_NAME = ".rows-{first_row}-{start}.safetensors"


def row_distances(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row from its counterpart, over the counterpart's norm, [n]."""
    rows, others = rows.float(), others.float()
    return (rows - others).norm(dim=-1) / others.norm(dim=-1)


def keep_rows(
    batch: object,
    destinations: Sequence[Destination | None],
    answers: Sequence[dict],
    states: Mapping[str, torch.Tensor],
    *,
    read: Sequence[int],
    root: Path,
) -> None:
    """Write the kept rows of each self-test request in a batch that was not refused.

    Args:
        batch: SGLang's forward batch.
        destinations: the destination of each request, None for another program's.
        answers: the plug-in's answer to each request; an error here is added as "error".
        states: r_0 … r_N and post_norm by name, [m, H] each.
        read: the rows of the batch that these m rows are, at least those to keep.
        root: the folder that the destinations' files are relative to.
    """
    at = 0
    for destination, answer, start, length in zip(
        destinations,
        answers,
        batch.extend_prefix_lens_cpu,
        batch.extend_seq_lens_cpu,
        strict=False,
    ):
        # A request that was refused may name any file.
        if destination and destination.kind == SELF_TEST and "error" not in answer:
            try:
                file = place_of(destination.file, root=root)
                positions = [row - at + start for row in read]
                inside = [at <= row < at + length for row in read]
                _write(file, destination, states, positions, inside)
            # Such as a full disk: no error of ours may end the server.
            except Exception as error:
                answer["error"] = f"rows of every layer: {type(error).__name__}: {error}"
        at += length


def _write(
    file: Path,
    destination: Destination,
    states: Mapping[str, torch.Tensor],
    positions: Sequence[int],
    inside: Sequence[bool],
) -> None:
    """Write the kept ones of a chunk's rows, whole or not at all.

    Args:
        positions: the place in the prompt of each of the m rows.
        inside: which of the m rows are of this request.
    """
    wanted = set(kept_positions(destination.rows))
    rows = [i for i, k in enumerate(positions) if inside[i] and k in wanted]
    if not rows:
        return
    index = torch.tensor(rows)
    tensors = {
        name: state.detach().index_select(0, index.to(state.device)).cpu().contiguous()
        for name, state in states.items()
    }
    tensors["positions"] = torch.tensor([positions[i] for i in rows])
    name = _NAME.format(first_row=destination.first_row, start=positions[rows[0]])
    final = file.with_name(file.name + name)
    partial = final.with_name(f".{final.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    # never through a link that another program has left there
    with open(partial, "xb") as opened:
        opened.write(save(tensors))
    os.replace(partial, final)


def read_kept_rows(file: Path, *, first_row: int) -> dict[str, torch.Tensor]:
    """Return the kept rows of one prompt by name, and their "positions", in order.

    Args:
        file: the shard that the prompt's request filled.
        first_row: the prompt's first row in the shard.
    """
    pattern = _NAME.format(first_row=first_row, start="*")
    parts = [load_file(path) for path in file.parent.glob(f"{file.name}{pattern}")]
    parts.sort(key=lambda part: int(part["positions"][0]))
    names = parts[0] if parts else {}
    return {name: torch.cat([part[name] for part in parts]) for name in names}
