"""A plot and a table of agreement by draft step: whole captures against captures with the cache's
fault, every seed.
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    "before": "before training",
    "faulty": "trained on captures with the cache's fault",
    "whole": "trained on whole captures",
}
COLOURS = {"before": "#999999", "faulty": "#d1495b", "whole": "#00798c"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--agreements", type=Path, nargs="+", required=True, help="<kind>-<seed>.json each"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="a .png or .svg; a table of the same name in .md beside it",
    )
    arguments = parser.parse_args()
    found: dict[str, list[list[float]]] = {kind: [] for kind in LABELS}
    for path in sorted(arguments.agreements):
        found[path.stem.split("-")[0]].append(json.loads(path.read_text())["agreement"])
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    steps = range(1, 4)
    for kind, runs in found.items():
        for run in runs:
            axes.plot(steps, run, "o", color=COLOURS[kind], alpha=0.5, markersize=4)
        axes.plot(
            steps,
            [statistics.mean(column) for column in zip(*runs, strict=True)],
            color=COLOURS[kind],
            label=LABELS[kind],
        )
    axes.set(
        xticks=list(steps),
        xlabel="draft step",
        ylabel="drafted tokens that are the target model's own",
        ylim=(0, None),
        title="EAGLE-3 for SmolLM2-135M, held-out conversations; one dot per seed",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(arguments.output, dpi=150)
    lines = ["| | step 1 | step 2 | step 3 |", "| --- | --- | --- | --- |"]
    for kind, runs in found.items():
        cells = [
            f"{statistics.mean(column):.3f} ({min(column):.3f} to {max(column):.3f})"
            for column in zip(*runs, strict=True)
        ]
        lines.append(f"| {LABELS[kind]} | {' | '.join(cells)} |")
    arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
