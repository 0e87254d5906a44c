"""Flow of rows from their sources to what became of them, as a drawing in SVG."""

import html
from collections import Counter
from collections.abc import Mapping

from draftstates.plan.words import of_share

_WIDTH, _LEFT, _RIGHT, _BAR = 860, 170, 560, 12
_TALL, _GAP, _LEAST = 190, 10, 2.0
# height of a label: a source has two lines
_LINE, _LINES = 22, 40
_MOST_SOURCES = 8


def flow(accounts: Mapping[str, Mapping[str, int]]) -> str:
    """Return an SVG element: on the left the sources, on the right kept rows and each reason.

    Bands are as wide as their numbers of rows; the smallest are drawn wider, to be seen.

    Args:
        accounts: by source, the number of rows by outcome; the outcome `kept` comes first. The
            smallest of many sources are drawn as one.
    """
    accounts = _joined(accounts)
    outcomes: dict[str, int] = {}
    for account in accounts.values():
        for outcome, count in account.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    order = sorted(outcomes, key=lambda name: (name != "kept", -outcomes[name], name))
    total = max(sum(outcomes.values()), 1)
    scale = _TALL / total

    def height(count: int) -> float:
        return max(_LEAST, count * scale) if count else 0.0

    sources = {
        name: sum(height(count) for count in account.values()) for name, account in accounts.items()
    }
    targets = {
        outcome: sum(height(account.get(outcome, 0)) for account in accounts.values())
        for outcome in order
    }
    left, left_end = _places(sources, label=_LINES)
    right, right_end = _places(targets, label=_LINE)
    parts = []
    at_left, at_right = dict(left), dict(right)
    for name, account in accounts.items():
        for outcome in order:
            wide = height(account.get(outcome, 0))
            if not wide:
                continue
            kind = "kept" if outcome == "kept" else "skipped"
            y0, y1 = at_left[name], at_right[outcome]
            at_left[name] += wide
            at_right[outcome] += wide
            x0, x1 = _LEFT + _BAR, _RIGHT
            middle = (x0 + x1) / 2
            label = html.escape(f"{name}: {account[outcome]:,} rows {outcome}")
            parts.append(
                f'<path class="{kind}" d="M{x0},{y0:.1f} C{middle},{y0:.1f} {middle},{y1:.1f}'
                f" {x1},{y1:.1f} L{x1},{y1 + wide:.1f} C{middle},{y1 + wide:.1f}"
                f' {middle},{y0 + wide:.1f} {x0},{y0 + wide:.1f} Z"><title>{label}</title></path>'
            )
    for name, wide in sources.items():
        rows = sum(accounts[name].values())
        parts.append(_node(_LEFT, left[name], wide, "source"))
        parts.append(_label(_LEFT - 8, left[name] + wide / 2, name, f"{rows:,} rows", end=True))
    for outcome, wide in targets.items():
        kind = "kept" if outcome == "kept" else "skipped"
        parts.append(_node(_RIGHT, right[outcome], wide, kind))
        what = f"{outcomes[outcome]:,} ({of_share(outcomes[outcome] / total)})"
        name = outcome if outcome == "kept" else outcome.replace("_", " ")
        parts.append(_label(_RIGHT + _BAR + 8, right[outcome] + wide / 2, name, what, end=False))
    tall = max(left_end, right_end) + _GAP
    return (
        f'<svg class="flow" viewBox="0 0 {_WIDTH} {tall:.0f}" role="img"'
        f' aria-label="Rows by source and outcome">{"".join(parts)}</svg>'
    )


def _joined(accounts: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Return the largest sources, and all others as one."""
    names = sorted(accounts, key=lambda name: -sum(accounts[name].values()))
    if len(names) <= _MOST_SOURCES:
        return {name: accounts[name] for name in names}
    others: Counter[str] = Counter()
    for name in names[_MOST_SOURCES - 1 :]:
        others.update(accounts[name])
    few = {name: accounts[name] for name in names[: _MOST_SOURCES - 1]}
    return {**few, f"{len(names) - len(few)} other sources": others}


def _places(heights: Mapping[str, float], *, label: float) -> tuple[dict[str, float], float]:
    """Return the upper end of each bar, so that the labels beside them do not touch.

    Args:
        heights: of the bars.
        label: height of a label.
    """
    found, at, free = {}, float(_GAP), 0.0
    for name, tall in heights.items():
        at = max(at, free - tall / 2 + label / 2)
        found[name] = at
        free = at + tall / 2 + label / 2
        at += tall + _GAP
    return found, max(at, free)


def _node(x: float, y: float, tall: float, kind: str) -> str:
    return f'<rect class="node {kind}" x="{x}" y="{y:.1f}" width="{_BAR}" height="{tall:.1f}"/>'


def _label(x: float, y: float, name: str, what: str, *, end: bool) -> str:
    anchor = ' text-anchor="end"' if end else ""
    shown = name if len(name) <= 24 else f"{name[:23]}…"
    name, what = html.escape(shown), html.escape(what)
    if end:
        return (
            f'<text x="{x}" y="{y - 2:.1f}"{anchor}>{name}</text>'
            f'<text class="quiet" x="{x}" y="{y + 14:.1f}"{anchor}>{what}</text>'
        )
    return f'<text x="{x}" y="{y + 4:.1f}">{name}<tspan class="quiet" dx="8">{what}</tspan></text>'
