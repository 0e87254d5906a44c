"""The self-test: a server's address is announced only when a probe that it captured twice has passed every check of a shard.

Run by the supervisor as `python -m draftstates.server.selftest`. What it finds is the attestation of a run.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftstates import ids, wire
from draftstates.alignment import Rounding, unit_roundoff
from draftstates.building import building_folder, publish
from draftstates.capture_spec import CaptureSpec
from draftstates.cli import run
from draftstates.client import Captured, Endpoint
from draftstates.errors import UserError
from draftstates.extract import ExtractOptions, capture, lay_out, receipts_document
from draftstates.model import read_model
from draftstates.parity import row_distances
from draftstates.server.address import read_address
from draftstates.server.engine import server_info
from draftstates.shard_tokens import ShardTokens
from draftstates.shards import Shard
from draftstates.verify import verify_shard

_LENGTHS = (10, 64, 300)
_OPTIONS = ExtractOptions(probe_fraction=1.0, probe_minimum=len(_LENGTHS), retries=0)
_HOOK_ROUNDINGS = 8  # a sum over tensor parallel ranks and the addition of the residual, each done twice
_FLAGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "dp_size",
    "attn_dp_size",
    "disable_radix_cache",
    "chunked_prefill_size",
    "attention_backend",
)


def attest(endpoint: Endpoint, *, spec: CaptureSpec, model: Path) -> dict[str, Any]:
    """Capture the probe twice and check promises 2 to 4 on it, and each r_k against what a hook on entry to layer k saw.

    Returns:
        the attestation: capture key, engine, flags and the probe's figures.

    Raises:
        UserError: names the check that failed and what is missing.
    """
    found = read_model(model)
    if found.digest != spec.model_digest:
        raise UserError(f"{model} holds {found.digest}, but the plan is of {spec.model_digest}: the model has changed since; plan again")
    info = server_info(endpoint.url, api_key=endpoint.api_key)
    started = time.monotonic()
    tokens = probe_tokens(found.vocab_size)
    with building_folder(endpoint.root / ".selftest" / socket.gethostname(), tokens.shard_id) as folder:
        first, figures, hooks = _pass(folder / "first", tokens, endpoint=endpoint, spec=spec, model=model, engine=info["version"])
        second, _, _ = _pass(folder / "second", tokens, endpoint=endpoint, spec=spec, model=model, engine=info["version"])
        repeat = max(
            row_distances(second.states(name, 0, second.header.rows), first.states(name, 0, first.header.rows)).max().item()
            for name in ("hidden_states", "final_hidden_state")
        )
    return {
        "format": "draftstates.attestation",
        "format_version": 1,
        "capture_key": spec.key,
        "engine": {"name": "sglang", "version": info["version"]},
        "flags": {name: info.get(name) for name in _FLAGS},
        "capture": dataclasses.asdict(spec),
        "probe": {**figures, "hook_distance": hooks, "repeat_distance": repeat, "seconds": round(time.monotonic() - started, 2)},
    }


def probe_tokens(vocabulary: int) -> ShardTokens:
    """The probe's samples: ids drawn once and for all, so that the second pass is what a cache would skip."""
    draw = np.random.default_rng(20261129)
    parts = [draw.integers(0, vocabulary, length).astype(np.int32) for length in _LENGTHS]
    names = [ids.sample_id(part, np.ones(len(part))) for part in parts]
    return ShardTokens(
        shard_id=ids.shard_id(names),
        sample_ids=names,
        lengths=list(_LENGTHS),
        input_ids=np.concatenate(parts),
        loss_mask=np.ones(sum(_LENGTHS), np.uint8),
    )


def _pass(
    folder: Path, tokens: ShardTokens, *, endpoint: Endpoint, spec: CaptureSpec, model: Path, engine: str
) -> tuple[Shard, dict[str, Any], float]:
    """One capture of the probe, verified as any shard: the shard, its figures, the largest distance from the entry hooks."""
    folder.mkdir()
    shard, probe, receipts = folder / "shard.safetensors", folder / "probe.safetensors", folder / "receipts.json"
    work, probes = lay_out(tokens, spec=spec, options=_OPTIONS, shard=shard, probe=probe, kind=wire.PROBE)
    rows = {shard: len(tokens.input_ids), probe: sum(count for _, count in probes)}
    captured = asyncio.run(capture(work, endpoint=endpoint, options=_OPTIONS, rows=rows))
    receipts.write_text(json.dumps(receipts_document(tokens, spec=spec, engines={engine}, captured=captured, probes=probes)))
    hooks = _hook_distance(captured[: len(tokens.sample_ids)], spec=spec)
    verified = verify_shard(tokens.shard_id, plan=_plan(tokens, spec), model=model, shard=shard, probe=probe, receipts=receipts, threads=1)
    return Shard(shard), verified["figures"], hooks


def _hook_distance(captured: list[Captured], *, spec: CaptureSpec) -> float:
    largest = 0.0
    limit = _HOOK_ROUNDINGS * unit_roundoff(Rounding.of(dataclasses.asdict(spec)).compute)
    for item in captured:
        if not item.prehook:
            raise UserError("the server did not compare its probe with the entry hooks: its plug-in is of another version")
        for layer, distance in item.prehook.items():
            if not distance <= limit:
                raise UserError(
                    f"r_{layer} as captured differs by {distance:.3g} of a row's norm from what a hook on entry to layer {layer} saw "
                    f"(limit {limit:.3g}): the server captures another layer, or one that is not yet summed over its ranks"
                )
            largest = max(largest, distance)
    return largest


def _plan(tokens: ShardTokens, spec: CaptureSpec) -> dict[str, Any]:
    entry = {"shard_id": tokens.shard_id, "samples": len(tokens.sample_ids), "tokens": len(tokens.input_ids)}
    return {
        "capture": {**dataclasses.asdict(spec), "key": spec.key},
        "shards": [entry],
        "checks": {"probe_fraction": _OPTIONS.probe_fraction, "probe_minimum": _OPTIONS.probe_minimum},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", type=Path, required=True, help="address file of the server to test")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True, help="folder below which the server writes")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    address, spec = read_address(arguments.address), CaptureSpec.from_plan(arguments.plan)
    endpoint = Endpoint(url=address.url, api_key=address.api_key, root=arguments.root, fresh_namespace=address.launcher == "external")
    attestation = attest(endpoint, spec=spec, model=arguments.model)
    # replicas are tested at the same time, also on other nodes; the last one's attestation stays
    partial = arguments.output.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    partial.write_text(json.dumps({**attestation, "launcher": address.launcher}, indent=1))
    publish(partial, arguments.output)


if __name__ == "__main__":
    run(main)
