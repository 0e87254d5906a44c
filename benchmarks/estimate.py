"""Cost of a capture with Kimi-K2.5 on 1, 4 and 16 nodes of eight GPUs, by simulation: the tables of
docs/scale.md.

    # hours, bytes, jobs, cost; the limit of each run; failures
    python benchmarks/estimate.py
    # compares the simulation with measured runs
    python benchmarks/estimate.py --validate

Layers and shard sizes are those of presets/kimi-k2.5.yaml. The output lists the inputs first, each
as measured or assumed.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import yaml
from scheduler import Outcome, Setup, Simulation

PRESET = Path(__file__).parents[1] / "presets" / "kimi-k2.5.yaml"
# bytes of a token in the measured runs
QWEN_ROW = 4 * 4096 * 2 + 5
# of the published model: its config.json and its weight files
HIDDEN, MODEL_BYTES = 7168, 595e9
NODES, SAMPLES = (1, 4, 16), (10_000, 100_000, 1_000_000)
UNITS = {"GiB": 2**30}
# seconds of Snakemake per job, benchmarks/scale.py, 5,121 shards
WITHOUT_SUBSAMPLE = 0.2

MEASURED = {
    "scan": (3.89e9, "bytes/s that a core reads and checks", "benchmarks/verify.py"),
    "align": (0.045, "core seconds per sample for the target model's head", "benchmarks/verify.py"),
    "dispatch": (
        0.025,
        "s of Snakemake per job",
        "benchmarks/scale.py, 5,121 shards, scheduler-subsample: 200",
    ),
    "job": (
        1.6,
        "s until a job's process is ready",
        "python scripts/verify.py --help; an extracting one takes 0.3",
    ),
    "plan": (22.5, "s of planning and building the graph", "benchmarks/scale.py, 5,121 shards"),
    "recaptures": (
        0.001,
        "more tokens, for the prefix recaptures",
        "benchmarks/capture.py, 384 samples in three shards",
    ),
    "write": (
        1.4e9,
        "bytes/s written and synced per node",
        "`dd` on the H200 machine, benchmarks/README.md",
    ),
    "tokens": (
        1485,
        "tokens per sample",
        "978 conversations of ShareGPT with DeepSeek-V3's tokenizer, scripts/tokenise.py",
    ),
}
ASSUMED = {
    "rates": ((10_000, 20_000, 50_000), "tokens/s of prefill per node"),
    "cores": (32, "cores per node that verify"),
    "load": (1e9, "bytes/s at which a node reads the weights when a server starts"),
    "price": (3.0, "dollars per GPU hour"),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: the tokens of its shards, and its resources."""

    nodes: int
    samples: int
    shards: list[int]
    setup: Setup

    @property
    def bytes(self) -> int:
        return sum(self.shards) * self.setup.row_bytes

    def simulate(
        self, *, shards: list[int] | None = None, seed: int = 0, **changes: float
    ) -> Outcome:
        return Simulation(
            shards or self.shards, dataclasses.replace(self.setup, **changes), seed=seed
        ).run()


def kimi(nodes: int, samples: int, rate: float) -> Run:
    """Return the run of the preset with the measured and assumed inputs."""
    preset = yaml.safe_load(PRESET.read_text())
    known = {name: value for name, (value, *_) in (MEASURED | ASSUMED).items()}
    row = (len(preset["capture"]["residual_layers"]) + 1) * HIDDEN * 2 + 5
    tokens = samples * known["tokens"]
    # The mean shard of content-defined cuts has twice `min_bytes`.
    mean = 2 * int(preset["shards"]["min_bytes"].removesuffix("GiB")) * UNITS["GiB"]
    count = max(1, round(tokens * row / mean))
    core_seconds = mean / known["scan"] + mean / row / known["tokens"] * known["align"]
    setup = Setup(
        rate=rate,
        replicas=nodes,
        streams=4 * nodes,
        row_bytes=row,
        write=known["write"] * nodes,
        cores=known["cores"] * nodes,
        verify=mean / core_seconds,
        dispatch=known["dispatch"],
        job=known["job"],
        start=MODEL_BYTES / known["load"],
        plan=known["plan"],
        recaptures=known["recaptures"],
    )
    return Run(nodes, samples, [tokens // count] * count, setup)


LIFTED: dict[str, Callable[[Run], Outcome]] = {
    "prefill": lambda run: run.simulate(rate=run.setup.rate * 1000),
    "disk": lambda run: run.simulate(write=inf),
    "verify": lambda run: run.simulate(verify=inf),
    "Snakemake": lambda run: run.simulate(dispatch=0.0, job=0.0, plan=0.0),
    "server start": lambda run: run.simulate(start=0.0),
    "few shards": lambda run: run.simulate(
        shards=[tokens // 8 for tokens in run.shards for _ in range(8)]
    ),
}


def limit(run: Run) -> str:
    """Return the resource whose removal alone saves most time, and the share that it saves."""
    whole = run.simulate().seconds
    saved = {name: 1 - lifted(run).seconds / whole for name, lifted in LIFTED.items()}
    name = max(saved, key=saved.__getitem__)
    return f"{name} ({saved[name]:.0%})"


def print_inputs() -> None:
    print("measured:")
    for value, what, source in MEASURED.values():
        print(f"  {value:,g} {what} ({source})")
    print("assumed:")
    for value, what in ASSUMED.values():
        values = value if isinstance(value, tuple) else [value]
        print(f"  {', '.join(f'{one:,g}' for one in values)} {what}")
    setup = kimi(1, 10_000, 1).setup
    rates = f"{setup.row_bytes:,} bytes per token, {setup.verify / 1e9:.2f} GB/s verified per core"
    print(f"from these: {rates}; a server starts in {setup.start:.0f} s\n")


def table() -> Iterator[list[str]]:
    yield [
        "nodes",
        "samples",
        "tokens",
        "TB",
        "shards",
        "jobs",
        "hours",
        "GPU hours",
        "dollars",
        *(f"limit at {rate:,}" for rate in ASSUMED["rates"][0]),
    ]
    rates, price = ASSUMED["rates"][0], ASSUMED["price"][0]
    for samples in SAMPLES:
        for nodes in NODES:
            runs = [kimi(nodes, samples, rate) for rate in rates]
            hours = [run.simulate().seconds / 3600 for run in runs]
            one = runs[0]
            span = [
                f"{max(values):,.{digits}f} to {min(values):,.{digits}f}"
                for values, digits in _spans(hours, 8 * nodes, price)
            ]
            jobs = 2 * len(one.shards) + 4
            amount = [
                f"{sum(one.shards) / 1e6:,.0f} M",
                f"{one.bytes / 1e12:,.1f}",
                f"{len(one.shards):,}",
                f"{jobs:,}",
            ]
            yield [f"{nodes}", f"{samples:,}", *amount, *span, *map(limit, runs)]


def _spans(hours: list[float], gpus: int, price: float) -> Iterator[tuple[list[float], int]]:
    yield hours, 2
    yield [gpus * value for value in hours], 0
    yield [gpus * price * value for value in hours], 0


def breaking_points() -> Iterator[list[str]]:
    yield ["resource", "capacity", "sufficient up to"]
    run, known = kimi(1, 1_000_000, 1), {name: value for name, (value, *_) in MEASURED.items()}
    setup, shard = run.setup, run.shards[0]
    yield [
        "disk, bytes per second",
        f"{setup.write / 1e9:.1f} GB/s per node",
        f"{setup.write / setup.row_bytes:,.0f} tokens/s per node",
    ]
    verified = setup.verify * setup.cores
    yield [
        "verification",
        f"{setup.cores} cores per node",
        f"{verified / setup.row_bytes:,.0f} tokens/s per node",
    ]
    for seconds, how in (
        (known["dispatch"], "as the profiles configure it"),
        (WITHOUT_SUBSAMPLE, "without scheduler-subsample"),
    ):
        yield [
            f"Snakemake, {how}",
            f"{seconds} s per job, two jobs per shard",
            f"{shard / (2 * seconds):,.0f} tokens/s of all nodes together",
        ]
    for terabytes in (10, 100):
        yield [
            "disk, space",
            f"{terabytes} TB",
            f"{terabytes * 1e12 / run.bytes * run.samples:,.0f} samples",
        ]


def failures() -> Iterator[list[str]]:
    yield ["a node fails every", "hours", "tokens captured for nothing"]
    run = kimi(16, 1_000_000, ASSUMED["rates"][0][1])
    for hours in (inf, 100, 24, 6):
        found = [run.simulate(failure=hours * 3600, seed=seed) for seed in range(5)]
        mean, lost = (
            sum(one.seconds for one in found) / 5 / 3600,
            sum(one.lost for one in found) / 5 / sum(run.shards),
        )
        yield ["never" if hours == inf else f"{hours} hours", f"{mean:.2f}", f"{lost:.1%}"]


def without_subsample() -> Iterator[list[str]]:
    yield [
        "Snakemake's time per job, 16 nodes, 1,000,000 samples",
        *(f"hours at {rate:,}" for rate in ASSUMED["rates"][0]),
    ]
    for seconds, what in (
        (MEASURED["dispatch"][0], "scheduler-subsample: 200"),
        (WITHOUT_SUBSAMPLE, "without"),
    ):
        runs = (kimi(16, 1_000_000, rate) for rate in ASSUMED["rates"][0])
        yield [
            f"{seconds} s ({what})",
            *(f"{run.simulate(dispatch=seconds).seconds / 3600:.2f}" for run in runs),
        ]


def validate() -> Iterator[list[str]]:
    """Compare the simulation with the measured runs of benchmarks/README.md, in tokens/s.

    Inputs are plain prefill and the disk's rate of each run.
    """
    yield ["run", "plain", "disk GB/s", "predicted", "measured", "predicted / measured"]
    for name, plain, replicas, write, recaptures, measured in (
        ("one H200, to /dev/shm", 37_096, 1, inf, 0.0015, 36_901),
        ("one H200, to disk", 37_096, 1, 1.2e9, 0.0015, 36_452),
        ("two H200, tensor parallel, to disk", 62_536, 1, 1.4e9, 0.0045, 54_460),
        ("two H200, two replicas, to /dev/shm", 70_815, 2, inf, 0.0018, 68_339),
        ("two H200, two replicas, to disk", 73_153, 2, 1.4e9, 0.0045, 49_253),
        ("the same, with the disk's rate during that run", 73_153, 2, 1.615e9, 0.0045, 49_253),
    ):
        setup = Setup(
            rate=plain / replicas,
            replicas=replicas,
            row_bytes=QWEN_ROW,
            write=write,
            recaptures=recaptures,
        )
        yield compared(
            name, plain, write, predicted=rate([542_000 // 4] * 4, setup), measured=measured
        )
    # benchmarks/workflow.py: 68 shards of 37 samples; the head has 151,936 rows of 4096 numbers
    tokens, samples = 5_309_198 // 68, 37
    core_seconds = tokens * QWEN_ROW / MEASURED["scan"][0] + samples * MEASURED["align"][0] * (
        151_936 * 4096
    ) / (163_840 * HIDDEN)
    setup = Setup(
        rate=36_119,
        streams=8,
        row_bytes=QWEN_ROW,
        cores=32,
        verify=tokens * QWEN_ROW / core_seconds,
        dispatch=MEASURED["dispatch"][0],
        job=MEASURED["job"][0],
        plan=1.2,
        recaptures=MEASURED["recaptures"][0],
    )
    yield compared(
        "one H200, the complete workflow",
        36_119,
        inf,
        predicted=rate([tokens] * 68, setup),
        measured=33_656,
    )


def rate(shards: list[int], setup: Setup) -> float:
    return sum(shards) / Simulation(shards, setup).run().seconds


def compared(
    name: str, plain: float, write: float, *, predicted: float, measured: float
) -> list[str]:
    disk = "-" if write == inf else f"{write / 1e9}"
    return [
        name,
        f"{plain:,}",
        disk,
        f"{predicted:,.0f}",
        f"{measured:,}",
        f"{predicted / measured:.2f}",
    ]


def show(rows: Iterator[list[str]]) -> None:
    """Print the rows as a table in Markdown."""
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + " --- |" * len(row))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--validate", action="store_true", help="compare with measured runs instead"
    )
    arguments = parser.parse_args()
    if arguments.validate:
        show(validate())
        return
    print_inputs()
    show(table())
    show(breaking_points())
    show(failures())
    show(without_subsample())


if __name__ == "__main__":
    main()
