"""A results folder as a finished run leaves it, made without a server, for tests of its readers."""

import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
from captured import END_TOKEN, VOCABULARY, capture, parity_of, tiny_model, verify, write

from draftstates.paths import Results
from draftstates.records import Accounting, Plan
from draftstates.shards.manifest import write_manifest
from draftstates.tokens.files import SampleWriter, publish_accounting
from draftstates.tokens.turns import Sample

# what a text may do to a page that does not escape it
HOSTILE = (
    "<script>window.hacked = true</script>",
    "</script><img src=x onerror='window.hacked = true'>",
    "{{ 7 * 7 }}",
    "\u202e desrever",
    "\u2028",
    "\x00\x1b[31m",
    "&lt;b&gt;",
    "مرحبا",
    "👩\u200d🔬",
)
SKIPPED = {"broken_json": 3, HOSTILE[0]: 1}


class WordTokenizer:
    """A tokenizer with a word per token; the first tokens are `HOSTILE`."""

    all_special_ids = (END_TOKEN, 8)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(self._text, ids))

    def _text(self, token: int) -> str:
        if token == END_TOKEN:
            return "<|end|>"
        if token == 8:
            return "<|user|>"
        offset = token - 10
        return HOSTILE[offset] if 0 <= offset < len(HOSTILE) else f" word{token}"


def make_results(folder: Path, *, shards: int = 2, source: str = "demo") -> Plan:
    """Write a results folder with verified shards of random samples, and return its plan."""
    results, model = Results(folder), tiny_model(folder / "model")
    plans, begin = [], 0
    results.tokens_folder.mkdir(parents=True)
    now = time.time()
    with SampleWriter(results.tokens(source)) as writer:
        for seed in range(shards):
            captured = capture(model, seed=seed)
            place = results.capture(captured.spec.folder_name)
            files = write(captured, place.shards)
            verify(files).publish(place.verified(captured.shard_id))
            plans.append(files.plan)
            names = captured.names
            frame = {"sample_id": names, "source": source, "row": np.arange(len(names)) + begin}
            results.shard_tokens_folder.mkdir(exist_ok=True)
            pd.DataFrame(frame).to_parquet(results.shard_tokens(captured.shard_id))
            for number, (tokens, mask) in enumerate(
                zip(captured.tokens, captured.masks, strict=True)
            ):
                writer.add(
                    row=begin + number, part=0, sample_id=names[number], sample=Sample(tokens, mask)
                )
            begin += len(names)
            _benchmark(results, place.name, "extract", captured.shard_id, now - 60 + 20 * seed, 18)
            _benchmark(results, place.name, "verify", captured.shard_id, now - 40 + 20 * seed, 2)
        writer.finish("a test")
    plan = _joined(plans, source)
    plan.publish(results.plan)
    account = plan.accounting.sources[source]
    counts = {name: value for name, value in vars(account).items() if name != "failed"}
    examples = [
        {"row": 7, "where": f"{HOSTILE[1]}, line 8", "reason": reason, "detail": HOSTILE[0]}
        for reason in SKIPPED
    ]
    counts |= {"conversations": account.kept, "with_reasoning": 1, "with_tools": 0}
    said = {**counts, "failed": {}, "lost_turns": {HOSTILE[0]: 2}, "examples": examples}
    publish_accounting(said, results.accounting(source), tokens=results.tokens(source))
    place = results.capture(plan.capture_folder)
    _benchmark(results, place.name, "server", "", now - 100, 40)
    attestation = {
        "engine": {"name": "sglang", "version": "0.5.23"},
        "flags": {"tp_size": 1},
        "settings": {"flags": {f"flag{n:02}": str(n) for n in range(50)}},
    }
    place.server.write_text(json.dumps({**attestation, "self_test": {"samples": 3, "seconds": 1}}))
    results.server_state.mkdir()
    results.server_log.write_text(
        "".join(
            f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now - 60 + at))}] Prefill batch,"
            f" #new-seq: 1, #new-token: {40 + at}, #running-req: 0, #queue-req: {at % 3}\n"
            for at in range(0, 40, 4)
        )
    )
    parity_of(plan.capture).publish(place.parity)
    write_manifest(
        plan,
        tokens=results.shard_tokens_folder,
        capture_folder=place.folder,
        manifest=place.manifest,
        samples=place.samples,
    )
    return plan


def _joined(plans: list[Plan], source: str) -> Plan:
    """Return a plan of the shards of several plans, with rows that were skipped."""
    totals = [plan.accounting.totals for plan in plans]
    names = ("rows_in", "kept", "samples", "tokens", "supervised_tokens")
    summed = {name: sum(getattr(each, name) for each in totals) for name in names}
    account = dataclasses.replace(totals[0], **summed, skipped=SKIPPED)
    account = dataclasses.replace(account, rows_in=account.kept + sum(SKIPPED.values()))
    return dataclasses.replace(
        plans[0],
        shards=tuple(shard for plan in plans for shard in plan.shards),
        accounting=Accounting(sources={source: account}, totals=account),
        bytes_needed=sum(plan.bytes_needed for plan in plans),
    )


def _benchmark(
    results: Results, capture: str, stage: str, name: str, start: float, seconds: float
) -> None:
    path = results.benchmark(capture, stage, name) if name else results.benchmark(capture, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"s\th:m:s\n{seconds}\t0:00:{seconds}\n")
    os.utime(path, (start + seconds,) * 2)


assert len(HOSTILE) + 10 < VOCABULARY
