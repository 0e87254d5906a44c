"""Charts of the report page, as Vega-Lite specifications.

Each chart has a few hundred values at most, whatever the number of samples. Colours and fonts are
the page's (`assets/page.js`), so that one chart serves the light and the dark page.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Chart = dict[str, Any]
# more sources than these share one line, so that colours stay apart
_MOST_SOURCES = 6
_BARS = 10
OTHERS = "other sources"
MOST_TICKS = 2000
_PARITY = {
    "median": "median row",
    "worst": "worst row",
    "limit": "limit of the median",
    "alone": "alone, median row",
    "alone_limit": "alone, limit",
}
_LIMITS = [_PARITY["limit"], _PARITY["alone_limit"]]
LEGEND = alt.Legend(title=None, orient="top", symbolOpacity=1, columns=4)
# `2k` and `0`, where d3 writes `0k` too; `20 MB` and `0 B`
COUNT = "format(datum.value, '~s')"
BYTES = f"replace({COUNT}, regexp('([kMGTP]?)$'), ' $1B')"
_POWERS = [10.0**power for power in range(-9, 10)]
# position 0 is at 1/2 on the axis of doublings
_PLACE = "datum.value < 1 ? '0' : format(datum.value, ',')"


def of_lengths(found: Mapping[str, Any], field: str, title: str) -> Chart:
    """Return the histogram of `lengths` or `supervised` of each source, on shared axes.

    Args:
        found: the statistics.
        field: which of the two.
        title: of the axis.
    """
    edges = found["edges"]
    rows = []
    for name, counts in _joined(found, lambda source: source[field].get("counts", [])).items():
        total = max(sum(counts), 1)
        for number, count in enumerate(counts):
            last = edges[number] * 2**0.5 if number + 1 == len(edges) else edges[number + 1]
            rows.append(
                {
                    "source": name,
                    "from": edges[number],
                    "to": round(last),
                    "samples": count,
                    "share": count / total,
                }
            )
    used = [row["from"] for row in rows if row["samples"]]
    if not used:
        return {}
    rows = [row for row in rows if min(used) <= row["from"] <= max(used)]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("from:Q", title=title, scale=alt.Scale(type="log", base=2, nice=False)).axis(
            format=",", grid=False, tickCount=8, labelOverlap=True
        ),
        x2="to:Q",
        color=coloured(sources),
        tooltip=[
            alt.Tooltip("source:N"),
            alt.Tooltip("from:Q", format=",", title="from"),
            alt.Tooltip("to:Q", format=",", title="below"),
            alt.Tooltip("samples:Q", format=","),
            alt.Tooltip("share:Q", format=".1%", title="of the source"),
        ],
    )
    y = alt.Y("share:Q", title="share of samples", stack=None).axis(format="%", tickCount=4)
    if len(sources) == 1:
        return spec(base.mark_rect(opacity=0.9, stroke="@card").encode(y=y, y2=alt.datum(0)))
    areas = base.mark_rect(opacity=0.15).encode(y=y, y2=alt.datum(0))
    tops = base.mark_rule(strokeWidth=2.5).encode(y=y)
    return spec(areas + tops)


def of_shares(found: Mapping[str, Any]) -> Chart:
    """Return the tokens of each source, supervised and context."""
    rows = []
    counts = _joined(found, lambda source: [source["tokens"], source["supervised_tokens"]], _BARS)
    for name, (tokens, supervised) in counts.items():
        for kind, count in (("supervised", supervised), ("context", tokens - supervised)):
            rows.append(
                {
                    "source": name,
                    "kind": kind,
                    "tokens": count,
                    "share": count / max(tokens, 1),
                    "of_all": tokens / max(found["tokens"], 1),
                }
            )
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(size=22, stroke="@card")
        .encode(
            y=alt.Y("source:N", title=None, sort="-x").axis(labelLimit=150),
            x=alt.X("sum(tokens):Q", title="tokens").axis(labelExpr=COUNT, tickCount=5),
            color=_by_kind(["supervised", "context"]),
            order=alt.Order("kind:N", sort="descending"),
            tooltip=[
                "source:N",
                alt.Tooltip("kind:N", title="tokens are"),
                alt.Tooltip("tokens:Q", format=","),
                alt.Tooltip("share:Q", format=".1%", title="of the source"),
                alt.Tooltip("of_all:Q", format=".1%", title="source, of all tokens"),
            ],
        )
    )
    return spec(chart, height=alt.Step(30) if len(counts) > 4 else 150)


def of_turns(found: Mapping[str, Any]) -> Chart:
    """Return the number of samples by supervised turns."""
    rows, most = [], 0
    for name, counts in _joined(found, lambda source: source["turns"]).items():
        for number, count in enumerate(counts):
            if count:
                most = max(most, number)
                label = f"{number}" if number + 1 < len(counts) else f"{number} or more"
                rows.append({"source": name, "turns": label, "number": number, "samples": count})
    if not rows:
        return {}
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(width={"band": 0.8})
        .encode(
            x=alt.X(
                "turns:O", title="supervised turns of a sample", sort=alt.SortField("number")
            ).axis(labelAngle=0),
            y=alt.Y("samples:Q", title="samples").axis(labelExpr=COUNT, tickCount=4),
            color=coloured(list(dict.fromkeys(row["source"] for row in rows))),
            tooltip=["source:N", "turns:O", alt.Tooltip("samples:Q", format=",")],
        )
    )
    return spec(chart)


def of_coverage(found: Mapping[str, Any], draft_size: int | None) -> Chart:
    """Return the share of supervised tokens that the most frequent n tokens cover.

    Args:
        draft_size: tokens of the drafter's vocabulary, to mark.
    """
    rows = [{"size": size, "share": share} for size, share in found["coverage"]["curve"]]
    if not rows:
        return {}
    x = alt.X("size:Q", title="tokens in the draft vocabulary", scale=alt.Scale(type="log"))
    line = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point={"size": 14, "filled": True}, interpolate="monotone")
        .encode(
            x=x.axis(format="~s", tickCount=6, grid=False),
            y=alt.Y("share:Q", title="supervised tokens covered").axis(format="%", tickCount=5),
            tooltip=[
                alt.Tooltip("size:Q", format=",", title="most frequent tokens"),
                alt.Tooltip("share:Q", format=".2%", title="covered"),
            ],
        )
    )
    if not draft_size:
        return spec(line)
    mark = alt.Chart(alt.Data(values=[{"size": draft_size, "text": "draft_vocab_size"}]))
    rule = mark.mark_rule(strokeDash=[4, 4]).encode(x="size:Q")
    text = mark.mark_text(align="right", dx=-6, dy=10, baseline="top").encode(
        x="size:Q", y=alt.value(0), text="text:N"
    )
    return spec(line + rule + text)


def of_margins(margins: Sequence[Mapping[str, Any]]) -> Chart:
    """Return each shard's share of the limit of each check.

    Args:
        margins: `check`, `shard`, `share`.
    """
    if not margins:
        return {}
    rows = sorted(margins, key=lambda row: -row["share"])[:MOST_TICKS]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("check:N", title=None).axis(labelLimit=220),
        x=alt.X(
            "share:Q",
            title="share of the limit",
            scale=alt.Scale(domain=[0, max(1.0, rows[0]["share"])]),
        ).axis(format="%", tickCount=5),
    )
    ticks = base.mark_tick(thickness=3, size=22, opacity=0.75).encode(
        color=alt.Color("check:N", legend=None),
        tooltip=["check:N", "shard:N", alt.Tooltip("share:Q", format=".2%")],
    )
    limit = (
        alt.Chart(alt.Data(values=[{"share": 1}])).mark_rule(strokeDash=[4, 4]).encode(x="share:Q")
    )
    return spec(ticks + limit, height=alt.Step(40))


def of_parity(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the distance of each layer from the checkpoint, beside its limit.

    Args:
        layers: `layer`, `median`, `worst`, `limit`, and where the layer was judged alone too,
            `alone` and `alone_limit`.
    """
    if not layers:
        return {}
    rows = [
        {"layer": layer["layer"], "number": number, "what": what, "distance": layer[field]}
        for number, layer in enumerate(layers)
        for field, what in _PARITY.items()
        if layer.get(field)
    ]
    shown = {row["what"] for row in rows}
    kinds = alt.Scale(domain=[what for what in _PARITY.values() if what in shown])
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("layer:N", title=None, sort=alt.SortField("number")).axis(
            labelAngle=0, labelOverlap="greedy"
        ),
        y=alt.Y(
            "distance:Q", title="distance over the row's norm", scale=alt.Scale(type="log")
        ).axis(format="~e", values=_POWERS),
        color=alt.Color("what:N", scale=kinds, legend=LEGEND),
        tooltip=["layer:N", "what:N", alt.Tooltip("distance:Q", format=".3g")],
    )
    is_limit = alt.FieldOneOfPredicate(field="what", oneOf=_LIMITS)
    marks = base.transform_filter(alt.LogicalNotPredicate(**{"not": is_limit})).mark_point(
        filled=True, size=60
    )
    limits = base.transform_filter(is_limit).mark_tick(thickness=2, width={"band": 1})
    return spec(marks + limits, height=220)


def of_norms(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the norms of rows by their position, a line with a band for each layer.

    Args:
        rows: `layer`, `position`, `low`, `median`, `high`.
    """
    if not rows:
        return {}
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X(
            "place:Q", title="position in the sample", scale=alt.Scale(type="log", base=2)
        ).axis(labelExpr=_PLACE, grid=False, tickCount=8),
        color=alt.Color("layer:N", sort=layers, legend=LEGEND),
    )
    scale = alt.Scale(type="log", nice=True)
    y = alt.Y("median:Q", title="norm of a row", scale=scale).axis(labelExpr=COUNT, values=_POWERS)
    band = base.mark_area(opacity=0.18).encode(
        y=alt.Y("low:Q", title="norm of a row", scale=scale), y2="high:Q"
    )
    line = base.mark_line(point={"size": 30, "filled": True}).encode(
        y=y,
        tooltip=[
            "layer:N",
            alt.Tooltip("position:Q", format=","),
            alt.Tooltip("low:Q", format=".4g", title="5 % below"),
            alt.Tooltip("median:Q", format=".4g"),
            alt.Tooltip("high:Q", format=".4g", title="5 % above"),
        ],
    )
    return spec(band + line, height=240)


def _joined(
    found: Mapping[str, Any], counts: Any, most: int = _MOST_SOURCES
) -> dict[str, list[int]]:
    """Return the counts of the largest sources, and those of the others together."""
    names = sorted(found["sources"], key=lambda name: -found["sources"][name]["tokens"])
    joined = {name: counts(found["sources"][name]) for name in names[:most]}
    others = [counts(found["sources"][name]) for name in names[most:]]
    if others := [each for each in others if each]:
        joined[OTHERS] = [sum(column) for column in zip(*others, strict=True)]
    return {name: each for name, each in joined.items() if each}


def coloured(names: Sequence[str], field: str = "source") -> alt.Color:
    """Return a colour for each name, with a legend if there are several.

    Args:
        names: in their order.
        field: of the data that has the names.
    """
    legend = None if len(names) < 2 else LEGEND
    return alt.Color(f"{field}:N", sort=list(names), legend=legend)


def _by_kind(kinds: Sequence[str]) -> alt.Color:
    scale = alt.Scale(domain=list(kinds), range=["@supervised", "@quiet"])
    return alt.Color("kind:N", scale=scale, legend=LEGEND)


def spec(chart: Any, height: Any = 180) -> Chart:
    """Return a chart as wide as its place on the page, as a specification."""
    return chart.properties(width="container", height=height).to_dict()
