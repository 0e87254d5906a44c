"""Time and peak memory of what a workflow does beside its work, against its size.

    python benchmarks/scale.py --folder /tmp/scale --sizes 50x10000 500x100000 5000x1000000 --json /tmp/scale.json
    python benchmarks/scale.py --json /tmp/scale.json --plot benchmarks/scale.svg

A size is shards x samples. No model runs: tokens and states are made up, with a hidden size of 8, so that 1,000,000 samples take
3 GB. Each step is the workflow's own command in a process of its own:

- plan: scripts/plan.py, from the tokens to plan.json and each shard's tokens
- run: Snakemake for --run-seconds, its extracting and verifying jobs reduced to moving files that are there: jobs a second on two
  cores, and Snakemake's own CPU; then it is killed, and the rest of the shards is put in place
- manifest: scripts/manifest.py, over every verified shard and sample
- nothing stale: `snakemake --dry-run`, once Snakemake has recorded how each file was made (`--touch`)
- open: `ShardDataset(manifest)` and its first and last sample, Python's start and the imports apart
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.pop(0)  # not this folder: its tokenize.py would hide the standard one

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import save_file

from draftstates import ids
from draftstates.capture_spec import CaptureSpec
from draftstates.shards import Shard, create
from draftstates.tokens.output import SCHEMA
from draftstates.verify import FORMAT, FORMAT_VERSION, file_checksum, sealed

HIDDEN, VOCABULARY, LONGEST = 8, 64, 30
STEPS = ("plan", "manifest", "nothing stale", "open")
LINKED = ("Snakefile", "rules", "draftstates", "schemas", "profiles")
MOVE = """
import os, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for suffix in {suffixes}:
    path = option["--output"].rsplit("/", 1)[0] + "/" + option["--shard-id"] + suffix
    os.rename("made/" + os.path.basename(path), path)
    os.utime(path)
"""
STAND_INS = {
    "extract.py": MOVE.format(suffixes=(".probe.safetensors", ".receipts.json", ".safetensors")),
    "verify.py": MOVE.format(suffixes=(".json",)),
    "server.py": "import sys; open(sys.argv[-1], 'w').write('{}')",
}
LAUNCH = """
import json, os, sys, time
start = time.perf_counter()
_, status, used = os.wait4(os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
found = {"wall": time.perf_counter() - start, "cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss / 1024}
json.dump(found, open("cost.json", "w"))
sys.exit(status != 0)
"""
TOUCH = """
import sys
from snakemake.executors.touch import Executor
Executor.SLEEPING_TIME = 0  # it waits 0.1 s a job
from snakemake.cli import main
main(sys.argv[1:])
"""
OPEN = """
import json, sys, time
from draftstates import ShardDataset
start, cpu = time.perf_counter(), time.process_time()
dataset = ShardDataset(sys.argv[1])
dataset[0], dataset[-1]
print(json.dumps({"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}))
"""


def cost(folder: Path, *command: str) -> dict[str, float]:
    """Seconds on the clock, seconds of CPU and peak memory in MiB of a command, which must succeed; it prints to `out.txt`.

    A small process starts it: one that is forked from a large one has that one's peak memory from the start.
    """
    with open(folder / "out.txt", "wb") as out:
        launched = [sys.executable, "-S", "-c", LAUNCH, *command]
        done = subprocess.run(launched, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {(folder / 'out.txt').read_text()[-3000:]}")
    return json.loads((folder / "cost.json").read_text())


def make_folder(folder: Path, *, shards: int, samples: int) -> None:
    """The workflow, with stand-ins for what needs a server; a model that is a head and nothing else; a source's tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("model", "made"):
        (folder / name).mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "scripts", folder / "scripts")
    for name, text in STAND_INS.items():
        (folder / "scripts" / name).write_text(text)
    shape = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}))
    save_file({"lm_head.weight": np.ones((VOCABULARY, HIDDEN), np.float32)}, folder / "model" / "model.safetensors")
    (folder / "source.jsonl").write_text("{}\n")
    write_tokens(folder / "results" / "tokens" / "source.parquet", samples)
    mean = samples * (LONGEST // 2 * (4 * HIDDEN * 2 + 5) + 8) // shards
    config = {
        "data": {"sources": [{"name": "source", "files": ["source.jsonl"]}], "max_tokens": LONGEST},
        "model": {"path": "model"},
        "capture": {"residual_layers": [2, 4, 5], "compute_dtype": "float32"},
        "shards": {"min_bytes": mean // 2, "max_bytes": 2 * mean},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def write_tokens(path: Path, samples: int) -> None:
    """`samples` random samples of up to LONGEST tokens as the tokeniser writes them, and their accounting."""
    path.parent.mkdir(parents=True)
    draw, tokens, targets = np.random.default_rng(samples), 0, 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for first in range(0, samples, 1024):
            lengths = draw.integers(1, LONGEST, min(1024, samples - first))
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            values = draw.integers(0, VOCABULARY, starts[-1]).astype(np.int32)
            values[starts[:-1]] = np.arange(first, first + len(lengths))  # no two samples alike
            masks = (draw.random(starts[-1]) < 0.5).astype(np.uint8)
            names = [ids.sample_id(values[a:b], masks[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
            lists = [pa.ListArray.from_arrays(pa.array(starts), pa.array(part)) for part in (values, masks)]
            rows = np.arange(first, first + len(names))
            columns = [pa.array(rows), pa.array(np.zeros(len(rows), np.int32)), pa.array(names), *lists]
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
            tokens, targets = tokens + int(starts[-1]), targets + int(masks.sum())
    counts = {"rows_in": samples, "kept": samples, "samples": samples, "skipped": {}, "failed": {}}
    path.with_suffix(".json").write_text(json.dumps({**counts, "tokens": tokens, "supervised_tokens": targets}))


def make_shards(folder: Path) -> tuple[str, int]:
    """Put every planned shard, of zeros, and what verification would say of it in `made/`; the capture's folder and the shards' number."""
    plan = json.loads((folder / "results" / "plan.json").read_text())
    spec = CaptureSpec.from_plan(folder / "results" / "plan.json")
    for entry in plan["shards"]:
        shard_id, path = entry["shard_id"], folder / "made" / f"{entry['shard_id']}.safetensors"
        table = pq.read_table(folder / "results" / "tokens" / "shards" / f"{shard_id}.parquet")
        inputs, masks = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
        starts, names, mask = inputs.offsets.to_numpy(), table["sample_id"].to_pylist(), masks.flatten().to_numpy()
        lengths, ids_ = np.diff(starts).tolist(), inputs.flatten().to_numpy()
        create(path, spec=spec, shard_id=shard_id, sample_ids=names, lengths=lengths, input_ids=ids_, loss_mask=mask)
        shard, targets = Shard(path), np.add.reduceat(mask.astype(np.int64), starts[:-1]).tolist()
        samples = [
            {"sample_id": names[i], "rows": lengths[i], "supervised": targets[i], "checksum": shard.checksum(i)} for i in range(len(names))
        ]
        found = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "shard_id": shard_id,
            "capture_key": spec.key,
            "engine": {"name": "none", "version": "0"},
            "bytes": shard.header.size,
            "checksum": file_checksum(path),
            "samples": samples,
            "figures": {"probes": 3, "probe_tokens": 3, "alignment_share_of_limit": 0.0, "prefix_distance": 0.0},
        }
        (folder / "made" / f"{shard_id}.json").write_text(json.dumps(sealed(found), indent=1) + "\n")
        for suffix in (".probe.safetensors", ".receipts.json"):
            path.with_suffix(suffix).write_text("-")
    return f"results/{plan['run']}", len(plan["shards"])


def run_for(folder: Path, seconds: float, *command: str) -> dict[str, float]:
    """Jobs a second that Snakemake ended within `seconds` of its first, and its own CPU meanwhile as a share of one core."""
    seen: list[tuple[float, float, int]] = []
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with open(folder / "out.txt", "wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True)
        while process.poll() is None and (not seen or seen[-1][0] - seen[0][0] < seconds):
            time.sleep(0.5)  # counting files takes time too
            if ended := _jobs_ended(folder):
                seen.append((time.perf_counter(), _cpu_seconds(process.pid), ended))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # an end in good order may take as long as the run
    if process.wait() not in (0, -signal.SIGKILL):
        sys.exit(f"error: {' '.join(command)}: {(folder / 'out.txt').read_text()[-3000:]}")
    shutil.rmtree(folder / ".snakemake" / "locks", ignore_errors=True)
    (first, cpu, ended), last = seen[0], seen[-1]
    return {"jobs_per_second": (last[2] - ended) / (last[0] - first), "core": (last[1] - cpu) / (last[0] - first)}


def _jobs_ended(folder: Path) -> int:
    return sum(len(list(folder.glob(f"results/*/{name}"))) for name in ("shards/*.receipts.json", "verified/*.json"))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, *, shards: int, samples: int, run_seconds: float, subsample: int, repeats: int) -> dict[str, Any]:
    """Each step's cost at one size."""
    make_folder(folder, shards=shards, samples=samples)
    python, snakemake = sys.executable, ["--cores", "2", "--quiet", "progress", "rules"]
    resolve = "import yaml; from draftstates.config import load; yaml.safe_dump(load('config.yaml'), open('resolved.yaml', 'w'))"
    cost(folder, python, "-c", resolve)
    tokens, plan = "results/tokens/source.parquet", "results/plan.json"
    command = ["scripts/plan.py", "--config", "resolved.yaml", "--tokens", tokens, "--model", "model", "--output", plan]
    found: dict[str, Any] = {"samples": samples, "plan": cost(folder, python, *command)}
    run, found["shards"] = make_shards(folder)
    (folder / plan).unlink()  # Snakemake plans again, so that it knows how plan.json was made
    if run_seconds:
        found["run"] = run_for(folder, run_seconds, python, "-m", "snakemake", *snakemake, "--scheduler-subsample", str(subsample))
    else:
        cost(folder, python, "-m", "snakemake", *snakemake, plan)
    place_rest(folder, run)
    manifest, table = f"{run}/manifest.json", f"{run}/samples.parquet"
    command = ["scripts/manifest.py", "--plan", plan, "--run-dir", run, "--output", manifest, "--samples", table]
    found["manifest"] = cost(folder, python, *command)
    cost(folder, python, "-c", TOUCH, "--cores", "20000", "--touch", "--rerun-incomplete", "--quiet", "progress", "rules")
    dry = [cost(folder, python, "-m", "snakemake", *snakemake, "--dry-run") for _ in range(repeats)]
    if "Nothing to be done" not in (folder / "out.txt").read_text():
        sys.exit(f"error: a dry run after a run has something to do: {(folder / 'out.txt').read_text()[-2000:]}")
    found["nothing stale"] = min(dry, key=lambda one: one["wall"])
    opened = []
    for _ in range(repeats):
        used = cost(folder, python, "-c", OPEN, manifest)
        opened.append({**used, **json.loads((folder / "out.txt").read_text())})
    found["open"] = min(opened, key=lambda one: one["wall"])
    return found


def place_rest(folder: Path, run: str) -> None:
    """Move what an interrupted run left, shards before what was found of them."""
    for suffix in (".safetensors", ".json"):
        for path in sorted((folder / "made").glob(f"*{suffix}")):
            part = "verified" if suffix == ".json" and not path.name.endswith(".receipts.json") else "shards"
            (folder / run / part).mkdir(parents=True, exist_ok=True)
            os.utime(path)
            path.rename(folder / run / part / path.name)
    if not (folder / run / "server.json").exists():
        (folder / run / "server.json").write_text("{}")


def draw(sizes: list[dict[str, Any]], path: Path) -> None:
    """Time and memory against shards, both axes logarithmic: a straight line of slope 1 is linear."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    shards = [size["shards"] for size in sizes]
    for step in STEPS:
        for axis, field in zip(axes, ("cpu", "memory"), strict=True):
            axis.loglog(shards, [size[step][field] for size in sizes], "o-", label=step)
    for axis, label in zip(axes, ("seconds of CPU", "peak memory, MiB"), strict=True):
        axis.set(xlabel="shards (200 samples each)", ylabel=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="scratch; each size is removed when measured")
    parser.add_argument("--sizes", nargs="*", default=[], help="shards x samples, such as 500x100000")
    parser.add_argument("--run-seconds", type=float, default=60, help="of Snakemake's run; 0 leaves it out")
    parser.add_argument("--subsample", type=int, default=200, help="ready jobs that Snakemake looks at, as in the profiles")
    parser.add_argument("--repeats", type=int, default=2, help="of the dry run and of opening: the fastest counts")
    parser.add_argument("--json", type=Path, required=True, help="figures; those of other sizes stay")
    parser.add_argument("--plot", type=Path, help=".svg or .png")
    arguments = parser.parse_args()
    sizes = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    for text in arguments.sizes:
        shards, samples = map(int, text.split("x"))
        folder = arguments.folder / text
        options = {name: getattr(arguments, name) for name in ("run_seconds", "subsample", "repeats")}
        found = measure(folder, shards=shards, samples=samples, **options)
        sizes = sorted([size for size in sizes if size["shards"] != found["shards"]] + [found], key=lambda size: size["shards"])
        arguments.json.write_text(json.dumps(sizes, indent=1))
        shutil.rmtree(folder)
    print(f"{'shards':>7}{'samples':>11}  {'step':14}{'wall s':>8}{'CPU s':>8}{'MiB':>7}")
    for size in sizes:
        for step in STEPS:
            print(f"{size['shards']:7,}{size['samples']:11,}  {step:14}" + "{wall:8.2f}{cpu:8.2f}{memory:7.0f}".format(**size[step]))
        if "run" in size:
            print(
                f"{size['shards']:7,}{size['samples']:11,}  run: "
                + "{jobs_per_second:.1f} jobs/s, {core:.0%} of a core".format(**size["run"])
            )
    if arguments.plot:
        draw(sizes, arguments.plot)


if __name__ == "__main__":
    main()
