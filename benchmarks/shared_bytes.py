"""Bytes of a plan, and seconds of verification, with and without shared prefixes.

    python benchmarks/shared_bytes.py --rows 300

Three sources, with Qwen3-8B's shape (four states of 4,096 numbers): ShareGPT under Qwen3's template
and under Llama-3's, and agents made up of ShareGPT's texts: 20 turns each, behind one of a few
system prompts of 3,000 tokens. The bytes are those that the plan counts of the shards' files, which
are laid out in that size; of compact storage they are the most that may be needed. The seconds are
CPU seconds of one thread that reads and checks each row of a shard of random states, with 512
numbers in each of four states, and hashes each sample.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import json
import tempfile
import time

import numpy as np
from tokenising import CACHE, ROOT, write_rows
from transformers import AutoTokenizer

from draftstates.plan.plan import PlanOptions, make_plan
from draftstates.plan.room import kept_bytes
from draftstates.plan.shard_tokens import read_tokens
from draftstates.records import Plan
from draftstates.shards import layout
from draftstates.spec import CaptureSpec
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.tokenise import tokenise_source
from draftstates.verify.checks import scan_sample

_SHAPE = {"num_layers": 36, "residual_layers": (2, 18, 33), "final_norm": "post_norm"}
_DTYPES = {"compute_dtype": "bfloat16", "stored_dtype": "bfloat16", "quantization": None}
_PROMPT_TOKENS, _TURNS, _AGENTS_OF_A_PROMPT = 3000, 20, 4


def spec_of(hidden_size: int) -> CaptureSpec:
    return CaptureSpec(
        model="benchmark",
        model_digest="none",
        hidden_size=hidden_size,
        engine_args=(),
        **_SHAPE,
        **_DTYPES,
    )


def write_agents(path: Path, rows: Path, count: int, tokenizer: AutoTokenizer) -> Path:
    """Write conversations of many turns behind shared system prompts, of other rows' texts."""
    texts = [
        turn["value"]
        for line in rows.read_text().split("\n")[:-1]
        for turn in json.loads(line).get("conversations", [])
        if 0 < len(turn.get("value", "")) < 2000
    ]
    whole = tokenizer.encode("\n".join(texts), add_special_tokens=False)
    prompts = [
        tokenizer.decode(whole[n * _PROMPT_TOKENS : (n + 1) * _PROMPT_TOKENS])
        for n in range(-(-count // _AGENTS_OF_A_PROMPT))
    ]
    with open(path, "w", encoding="utf-8") as out:
        for number in range(count):
            mine = texts[number * 2 * _TURNS : (number + 1) * 2 * _TURNS]
            messages = [{"role": "system", "content": prompts[number // _AGENTS_OF_A_PROMPT]}]
            messages += [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate(mine)
            ]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return path


def plan_of(tokens: Path, folder: Path, *, hidden_size: int, **shards: object) -> Plan:
    options = PlanOptions(
        budget=None, exclude=[], deduplicate=True, **{"share_prefixes": True, **shards}
    )
    return make_plan([tokens], spec=spec_of(hidden_size), results=folder, options=options)


def seconds_of_checks(tokens: Path, folder: Path, *, share: bool) -> tuple[float, int]:
    """Return the CPU seconds that the checks of the first shard take, and its tokens."""
    small = {"min_bytes": 100 << 20, "max_bytes": 600 << 20}
    plan = plan_of(tokens, folder, hidden_size=512, share_prefixes=share, **small)
    entry = plan.shards[0]
    found = read_tokens(
        folder / "tokens" / "shards" / f"{entry.shard_id}.parquet", shard_id=entry.shard_id
    )
    path = folder / "shard.safetensors"
    header = layout.create(path, spec=plan.capture, **vars(found))
    draw = np.random.default_rng(0)
    states = np.memmap(path, np.uint8, "r+")
    for begin, width in header.states().values():
        # finite numbers in bfloat16
        values = draw.integers(0x3C00, 0x4000, header.rows * width // 2, dtype=np.uint16)
        states[begin : begin + header.rows * width] = values.view(np.uint8)
    states.flush()
    shard = layout.Shard(path)
    start = time.process_time()
    for index in range(len(shard)):
        assert not scan_sample(shard, index).findings
        if shard.segments.shared(index):
            shard.checksum(index)
    seconds = time.process_time() - start
    path.unlink()
    return seconds, entry.tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300, help="rows of ShareGPT")
    parser.add_argument("--agents", type=int, default=12, help="conversations of agents")
    arguments = parser.parse_args()
    tokenizers = {name: ROOT / ".cache" / "tokenizers" / name for name in ("qwen3", "llama3")}
    CACHE.mkdir(parents=True, exist_ok=True)
    print(
        "| source | shared | samples | tokens | bytes per supervised token | of format 1 |", end=""
    )
    print(" e4m3, top token kept | of format 1 | CPU s of checks per million tokens |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = write_rows(folder / "rows.jsonl", arguments.rows)
        qwen3 = AutoTokenizer.from_pretrained(tokenizers["qwen3"])
        agents = write_agents(folder / "agents.jsonl", rows, arguments.agents, qwen3)
        for name, data, tokenizer in (
            ("ShareGPT, Qwen3", rows, "qwen3"),
            ("ShareGPT, Llama-3", rows, "llama3"),
            ("agents, Qwen3", agents, "qwen3"),
        ):
            tokens = folder / f"{data.stem}-{tokenizer}.parquet"
            tokenise_source(
                name=tokens.stem,
                paths=[data],
                tokenizer_path=tokenizers[tokenizer],
                options=TokeniseOptions(
                    max_tokens=16384, over_long="cut", max_skipped_fraction=1.0
                ),
                output=tokens,
                accounting=tokens.with_suffix(".json"),
                workers=2,
            )
            whole = 0
            for share in (False, True):
                plan = plan_of(tokens, folder, hidden_size=4096, share_prefixes=share)
                totals = plan.accounting.totals
                size = sum(shard.bytes for shard in plan.shards)
                compact = sum(
                    kept_bytes(shard, spec=plan.capture, form="e4m3-top-token")
                    for shard in plan.shards
                )
                whole = whole or size
                seconds, checked = seconds_of_checks(tokens, folder, share=share)
                print(
                    f"| {name} | {'once' if share else 'no'} | {totals.samples:,} |"
                    f" {totals.tokens:,} | {size / totals.supervised_tokens:,.0f} |"
                    f" {size / whole:.4f} | {compact / totals.supervised_tokens:,.0f} |"
                    f" {compact / whole:.4f} | {seconds / checked * 1e6:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
