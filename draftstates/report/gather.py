"""What the report's pages show, read from a results folder."""

from pathlib import Path
from typing import Any

from draftstates.paths import Results
from draftstates.records import Plan
from draftstates.report.facts import named_samples
from draftstates.report.page import Numbers
from draftstates.report.shown import choose, shown_samples
from draftstates.report.statistics import statistics
from draftstates.report.timeline import timeline
from draftstates.report.trust import trust


def gather(
    plan: Path,
    tokenizer: Any,
    *,
    captured: bool,
    tokens_per_second: float | None = None,
    draft_vocab_size: int | None = None,
) -> Numbers:
    """Return what a page shows.

    Args:
        plan: `results/plan.json`; all else lies beside it.
        tokenizer: transformers' tokenizer.
        captured: whether the page shows what a capture has made.
        tokens_per_second: assumed rate of the capture, for the hours.
        draft_vocab_size: size of a drafter's vocabulary, to mark.

    Raises:
        UserError: the plan or the tokens of a source are missing or disagree.
    """
    content, results = Plan.read(plan), Results.of_plan(plan)
    found = statistics(
        content, tokens_folder=results.tokens_folder, tokens_per_second=tokens_per_second
    )
    run: dict[str, Any] = {}
    why: dict[str, tuple[str, bool]] = {}
    if captured:
        checked = trust(results, content)
        why = named_samples(content, checked)
        run = {
            "capture": results.capture(content.capture_folder),
            "times": timeline(results, content),
            "trust": checked,
        }
    paths = {name: results.tokens(name) for name in content.accounting.sources}
    return Numbers(
        plan=content,
        statistics=found,
        samples=shown_samples(choose(paths, named=why), tokenizer, why=why),
        draft_vocab_size=draft_vocab_size,
        **run,
    )
