"""The report page: one HTML file that needs no network.

Text of conversations is escaped where the template writes it, and in the page's data, which a
script reads as JSON and shows as text.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from altair import VEGALITE_VERSION
from markupsafe import Markup

from draftstates.errors import counted, visible
from draftstates.paths import Capture
from draftstates.plan.words import of_bytes, of_count, of_seconds, of_share
from draftstates.records import Plan
from draftstates.report import charts, time_charts
from draftstates.report.facts import (
    answers_of,
    checks_of,
    lost_of,
    margins_of,
    origins_of,
    skipped_of,
    worst_of,
)
from draftstates.report.flow import flow

_ASSETS = Path(__file__).with_name("assets")
_MOST_SHARDS = 1000
# of a table of sources and reasons
_MOST_ROWS = 500
_KEPT_SUMMARY = ("format", "format_version", "files", "trainer", "path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a page shows.

    Attributes:
        plan: the plan.
        statistics: of the sources (see `draftstates.report.statistics`).
        samples: samples to show (see `draftstates.report.shown`).
        capture: the capture folder of a run that has captured; None for a page of tokens alone.
        times: of the run (see `draftstates.report.timeline`).
        trust: results of the checks (see `draftstates.report.trust`).
        draft_vocab_size: the configured size of the drafter's vocabulary.
    """

    plan: Plan
    statistics: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    capture: Capture | None = None
    times: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trust: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draft_vocab_size: int | None = None


def page(numbers: Numbers) -> str:
    """Return the page as HTML."""
    drawn = _charts(numbers)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "count": of_count,
        "size": of_bytes,
        "visible": visible,
        "percent": of_share,
        "number": lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}",
    }
    return environment.get_template("page.html").render(
        **_head(numbers),
        **_data(numbers),
        **(_captured(numbers) if numbers.capture else _NOT_CAPTURED),
        complete=numbers.capture is not None,
        charts=drawn,
        coverage_note=_coverage_note(numbers),
        charts_json=as_json(drawn),
        samples_json=as_json(numbers.samples),
        css=_trusted((_ASSETS / "page.css").read_text(encoding="utf-8")),
        js=_trusted((_ASSETS / "page.js").read_text(encoding="utf-8")),
        vega=_vega(),
    )


_NOT_CAPTURED: dict[str, Any] = {"norms": {"rows": 0}}


def as_json(content: Any) -> Markup:
    """Return JSON that may stand in a script element: it ends no element and begins no comment.

    A number that is not finite, which JSON does not have, becomes null: a chart leaves it out.
    """
    text = json.dumps(_finite(content), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _trusted(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _trusted(text: str) -> Markup:
    """Mark a text that the page holds as it is, since this package has made or escaped it."""
    return Markup(text)  # noqa: S704


@functools.cache
def _vega() -> Markup:
    """Return the JavaScript that draws charts, of the Vega-Lite that they are written for."""
    version = ".".join(VEGALITE_VERSION.split(".")[:2])
    return _trusted(vl_convert.javascript_bundle(vl_version=version))


def _charts(numbers: Numbers) -> dict[str, charts.Chart]:
    found, times = numbers.statistics, numbers.times
    makers: dict[str, Callable[[], charts.Chart]] = {
        "lengths": lambda: charts.of_lengths(found, "lengths", "tokens"),
        "supervised": lambda: charts.of_lengths(found, "supervised", "supervised tokens"),
        "shares": lambda: charts.of_shares(found),
        "turns": lambda: charts.of_turns(found),
        "coverage": lambda: charts.of_coverage(found, numbers.draft_vocab_size),
    }
    if numbers.capture:
        makers |= {
            "rates": lambda: time_charts.of_rates(times),
            "queue": lambda: time_charts.of_queue(times),
            "jobs": lambda: time_charts.of_jobs(times),
            "writing": lambda: time_charts.of_writing(times),
            "disk": lambda: time_charts.of_disk(times),
            "stages": lambda: time_charts.of_stages(times),
            "margins": lambda: charts.of_margins(margins_of(numbers.plan, numbers.trust)),
            "parity": lambda: charts.of_parity(numbers.trust["parity"].get("layers", [])),
            "norms": lambda: charts.of_norms(numbers.trust["norms"].get("by_position", [])),
        }
    return {name: chart for name, make in makers.items() if (chart := make())}


def _head(numbers: Numbers) -> dict[str, Any]:
    plan, found = numbers.plan, numbers.statistics
    spec, totals = plan.capture, plan.accounting.totals
    layers = ", ".join(f"r_{k}" for k in spec.residual_layers)
    final = f"the final state ({spec.final_norm})" if spec.final_state else ""
    states = f"{' and '.join(filter(None, [layers, final]))} of every token, stored in"
    states += f" {spec.stored_dtype}"
    sources = "1 source" if len(found["sources"]) == 1 else f"{len(found['sources'])} sources"
    of_what = f"{of_count(totals.samples)} samples of {sources}"
    supervised = totals.supervised_tokens / max(totals.tokens, 1)
    tokens = {
        "value": of_count(totals.tokens),
        "text": f"tokens, {of_share(supervised)} supervised",
    }
    kept = {
        "value": of_share(totals.kept / max(totals.rows_in, 1)),
        "text": f"of {of_count(totals.rows_in)} rows kept",
    }
    if not numbers.capture:
        hours = found["hours"]
        return {
            "title": f"{spec.model}: before the capture",
            "lead": f"{of_what}, to be captured from {spec.model} as {states}.",
            "figures": [
                kept,
                tokens,
                {
                    "value": of_bytes(found["bytes_needed"]),
                    "text": f"to write, {of_bytes(found['disk_free'])} free when planned",
                },
                {"value": of_seconds(hours * 3600), "text": "to capture, at the configured rate"}
                if hours is not None
                else {"value": of_count(totals.samples), "text": "samples"},
                {"value": of_count(found["shards"]), "text": "shards planned"},
            ],
            "command": "snakemake --cores all",
            "footer": f"Capture key {spec.key}.",
        }
    trust = numbers.trust
    passed, planned = len(trust["shards"]), len(plan.shards)
    size = sum(shard["bytes"] for shard in trust["shards"])
    jobs = numbers.times["jobs"]
    spent = max((job["end"] for job in jobs), default=0) - min(
        (job["start"] for job in jobs), default=0
    )
    all_passed = passed == planned and planned > 0
    return {
        "title": f"{spec.model}: {'verified hidden states' if all_passed else 'capture'}",
        "lead": (
            f"{of_what}, captured from {spec.model} as {states}."
            if all_passed
            else f"{of_what}, to be captured from {spec.model} as {states}: {passed:,} of"
            f" {planned:,} shards are captured and verified."
        ),
        "figures": [
            kept,
            tokens,
            {"value": of_bytes(size), "text": f"in {counted(passed, 'shard')}"},
            {
                "value": of_seconds(spent) if jobs else "unknown",
                "text": "from the server's start to the last check"
                if jobs
                else "there are no benchmark files of this capture",
            },
            {
                "value": f"{passed:,} of {planned:,}",
                "text": "shards passed every check",
                "kind": "good" if all_passed else "bad",
            },
        ],
        "command": (
            "from draftstates import ShardDataset\n\n"
            f'samples = ShardDataset("{numbers.capture.folder}")'
            if trust["manifest"]
            else "snakemake --cores all"
        ),
        "footer": f"Capture key {spec.key}.",
    }


def _data(numbers: Numbers) -> dict[str, Any]:
    found, plan = numbers.statistics, numbers.plan
    prefixes = found["prefixes"]
    sources = found["sources"]
    accounts = {
        name: {"kept": source["kept"], **source["skipped"], **source["failed"]}
        for name, source in sources.items()
    }
    skipped, lost = skipped_of(sources), lost_of(sources)
    total = plan.accounting.totals.samples
    shown = len(numbers.samples)
    named = sum(bool(sample["why"]) for sample in numbers.samples)
    return {
        "sources": sources,
        "totals": plan.accounting.totals,
        "repeated": {
            "tokens": prefixes["repeated"],
            "share": prefixes["repeated"] / max(prefixes["tokens"], 1),
            "step": prefixes["step"],
        },
        "flow": _trusted(flow({visible(name): account for name, account in accounts.items()})),
        "skipped": skipped[:_MOST_ROWS],
        "more_skipped": max(0, len(skipped) - _MOST_ROWS),
        "lost": lost[:_MOST_ROWS],
        "more_lost": max(0, len(lost) - _MOST_ROWS),
        "answers": answers_of(sources),
        "selection": (
            f"All {of_count(total)} samples."
            if shown == total
            else f"{shown} of {of_count(total)} samples, chosen by a hash of their content"
            + (f", with {named} that a check names." if named else ".")
        ),
    }


def _captured(numbers: Numbers) -> dict[str, Any]:
    trust, times = numbers.trust, numbers.times
    parity = trust["parity"]
    earlier = times["earlier"]
    by_log = any(row["queue"] is not None for row in times["rates"])
    return {
        "refused": trust["refused"],
        "worst": worst_of(numbers.plan, trust),
        "checks": checks_of(numbers.plan, trust),
        "origins": origins_of(numbers.plan, trust),
        "shards": trust["shards"][:_MOST_SHARDS],
        "more_shards": max(0, len(trust["shards"]) - _MOST_SHARDS),
        "norms": {name: trust["norms"].get(name, 0) for name in ("rows", "positions", "layers")},
        "exports": [
            {
                "trainer": export["trainer"],
                "folder": str(Path(export["path"]).parent),
                "content": ", ".join(
                    f"{name} {value}"
                    for name, value in export.items()
                    if name not in _KEPT_SUMMARY and isinstance(value, str | int | float)
                ),
            }
            for export in trust["exports"]
        ],
        "capture_note": (
            "What the servers did and when."
            if times["jobs"]
            else "There are no benchmark files of this capture, so its times are not known."
        )
        + (f" {of_count(earlier)} shards of earlier runs are not in these charts." * bool(earlier)),
        "rates_note": (
            "As the servers' logs tell it; the dashed lines are starts and passed self-tests."
            if by_log
            else "The servers' logs are missing or of another time: each shard's mean rate over"
            " its own time."
        ),
        "parity_note": (
            f"Distance of the self-test's rows from a plain Hugging Face forward pass:"
            f" {parity.get('result', 'compared')}. A distance of 0 has no mark."
            + (
                " A layer alone: the checkpoint's layer, given the captured rows before it, so that"
                " roundings do not add up."
            )
            * any(layer.get("alone") is not None for layer in parity.get("layers", []))
        ),
    }


def _coverage_note(numbers: Numbers) -> str:
    coverage, size = numbers.statistics["coverage"], numbers.draft_vocab_size
    distinct = coverage["distinct"]
    note = (
        f"The share of supervised tokens that the most frequent tokens make up; {distinct:,}"
        " different tokens are supervised."
    )
    if not size:
        return note
    if size >= distinct:
        return f"{note} draft_vocab_size {size:,} covers all of them."
    share = max((share for count, share in coverage["curve"] if count <= size), default=0.0)
    return f"{note} draft_vocab_size {size:,} covers {of_share(share)} of them, or a little more."
