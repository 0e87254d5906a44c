"""Charts of a run over time, on one axis, and of the seconds of its stages."""

from collections.abc import Mapping
from typing import Any

import altair as alt

from draftstates.report.charts import BYTES, COUNT, MOST_TICKS, Chart, coloured, spec

# room for labels, so that the times of all charts stand one below the other
_LEFT = {"minExtent": 62, "maxExtent": 62}
# of the chart of jobs, from above
_STAGES = ["server", "extract", "verify", "compact"]


def of_rates(times: Mapping[str, Any]) -> Chart:
    """Return the tokens per second of each server over time, with starts and restarts."""
    if not times["rates"]:
        return {}
    rows = [{**row, "start": _ms(row["start"]), "end": _ms(row["end"])} for row in times["rates"]]
    servers = list(dict.fromkeys(row["server"] for row in rows))
    area = (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(opacity=0.9 if len(servers) == 1 else 0.5, clip=True)
        .encode(
            x=_time("start:T", times),
            x2="end:T",
            y=alt.Y("per_second:Q", title="tokens a second").axis(
                labelExpr=COUNT, tickCount=4, **_LEFT
            ),
            y2=alt.datum(0),
            color=coloured(servers, field="server"),
            tooltip=[
                "server:N",
                alt.Tooltip("start:T", format="%H:%M:%S"),
                alt.Tooltip("per_second:Q", format=",.0f", title="tokens a second"),
                alt.Tooltip("queue:Q", format=",", title="longest queue"),
            ],
        )
    )
    return spec(_with_events(area, times), height=150)


def of_queue(times: Mapping[str, Any]) -> Chart:
    """Return the waiting requests of each server over time."""
    rows = [
        {"server": row["server"], "at": _ms(row["start"]), "requests": row["queue"]}
        for row in times["rates"]
        if row["queue"] is not None
    ]
    if not rows:
        return {}
    longest = max(1, *(row["requests"] for row in rows))
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(interpolate="step-after", strokeWidth=1.5, clip=True)
        .encode(
            x=_time("at:T", times),
            y=alt.Y(
                "requests:Q",
                title="queue",
                scale=alt.Scale(domain=[0, longest]),
            ).axis(labelExpr=COUNT, tickCount=min(3, longest), **_LEFT),
            color=coloured(list(dict.fromkeys(row["server"] for row in rows)), field="server"),
            tooltip=["server:N", alt.Tooltip("at:T", format="%H:%M:%S"), "requests:Q"],
        )
    )
    return spec(chart, height=80)


def of_writing(times: Mapping[str, Any]) -> Chart:
    """Return the bytes a second that went to the disk over time."""
    rows = [
        {"at": _ms(row["start"]), "bytes_per_second": row["per_second"]} for row in times["writing"]
    ]
    if not rows:
        return {}
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_area(interpolate="step-after", line=True, opacity=0.25, clip=True)
        .encode(
            x=_time("at:T", times),
            y=alt.Y("bytes_per_second:Q", title="bytes a second").axis(
                labelExpr=BYTES, tickCount=3, **_LEFT
            ),
            tooltip=[
                alt.Tooltip("at:T", format="%H:%M:%S"),
                alt.Tooltip("bytes_per_second:Q", format=",.0f", title="bytes a second"),
            ],
        )
    )
    return spec(chart, height=80)


def of_disk(times: Mapping[str, Any]) -> Chart:
    """Return the bytes of the finished shards over time."""
    if not times["disk"]:
        return {}
    start = min(job["start"] for job in times["jobs"])
    rows = [{"at": _ms(start), "bytes": 0}]
    disk = times["disk"]
    # the last one is the total
    kept = disk[-1 :: -(len(disk) // MOST_TICKS + 1)][::-1]
    rows += [{"at": _ms(each["at"]), "bytes": each["bytes"]} for each in kept]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_area(interpolate="step-after", line=True, opacity=0.25, clip=True)
        .encode(
            x=_time("at:T", times),
            y=alt.Y("bytes:Q", title="bytes written").axis(labelExpr=BYTES, tickCount=3),
            tooltip=[
                alt.Tooltip("at:T", format="%H:%M:%S"),
                alt.Tooltip("bytes:Q", format=",", title="bytes written"),
            ],
        )
    )
    return spec(chart, height=170)


def of_jobs(times: Mapping[str, Any]) -> Chart:
    """Return when each job of the server, of extraction and of verification ran."""
    jobs = times["jobs"]
    if not jobs:
        return {}
    if len(jobs) > MOST_TICKS:
        jobs = jobs[:: len(jobs) // MOST_TICKS + 1]
    rows = [
        {
            **job,
            "start": _ms(job["start"]),
            "end": _ms(job["end"]),
            "seconds": job["end"] - job["start"],
            "name": job["name"][:8] or "server",
        }
        for job in jobs
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(opacity=0.65, cornerRadius=2, clip=True, height={"band": 0.7}, stroke=None)
        .encode(
            x=_time("start:T", times),
            x2="end:T",
            y=alt.Y("stage:N", title="stage", sort=_STAGES).axis(**_LEFT),
            color=alt.Color("stage:N", legend=None, sort=_STAGES),
            tooltip=[
                alt.Tooltip("stage:N"),
                alt.Tooltip("name:N", title="shard"),
                alt.Tooltip("start:T", format="%H:%M:%S"),
                alt.Tooltip("seconds:Q", format=",.1f"),
                alt.Tooltip("tokens:Q", format=","),
            ],
        )
    )
    return spec(chart, height=alt.Step(28))


def of_stages(times: Mapping[str, Any]) -> Chart:
    """Return the seconds of each stage, summed over its jobs."""
    rows = [
        {"stage": name, "number": number, **stage}
        for number, (name, stage) in enumerate(times["stages"].items())
    ]
    if not rows:
        return {}
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("stage:N", title=None, sort=alt.SortField("number")),
        x=alt.X("seconds:Q", title="seconds, summed over the jobs").axis(
            labelExpr=COUNT, tickCount=5
        ),
        tooltip=[
            "stage:N",
            alt.Tooltip("jobs:Q", format=","),
            alt.Tooltip("seconds:Q", format=",.1f"),
        ],
    )
    bars = base.mark_bar(height={"band": 0.7})
    text = base.mark_text(align="left", dx=5).encode(text=alt.Text("seconds:Q", format=",.1f"))
    return spec(bars + text, height=alt.Step(26))


def _with_events(chart: alt.Chart, times: Mapping[str, Any]) -> alt.LayerChart | alt.Chart:
    first, last = _span(times)
    events = [
        {"at": _ms(event["at"]), "what": event["what"]}
        for event in times["events"]
        if first <= event["at"] <= last
    ]
    if not events:
        return chart
    base = alt.Chart(alt.Data(values=events[:MOST_TICKS])).encode(x="at:T")
    rule = base.mark_rule(strokeDash=[3, 3]).encode(
        tooltip=["what:N", alt.Tooltip("at:T", format="%H:%M:%S")]
    )
    text = base.mark_text(align="left", dx=4, dy=4, baseline="top").encode(
        y=alt.value(0), text="what:N"
    )
    return chart + rule + text


def _time(field: str, times: Mapping[str, Any]) -> alt.X:
    """Return the axis of time that all charts of a run share; the page names the time zone."""
    first, last = _span(times)
    domain = [_ms(first), _ms(max(last, first + 1))]
    return alt.X(field, title="@time", scale=alt.Scale(domain=domain, nice=False)).axis(
        grid=False, tickCount=6, labelFlush=True, format=_clock(last - first)
    )


def _span(times: Mapping[str, Any]) -> tuple[float, float]:
    """Return when the first job began and the last one ended."""
    jobs = times["jobs"]
    return min(job["start"] for job in jobs), max(job["end"] for job in jobs)


def _clock(seconds: float) -> str:
    """Return how an axis over so many seconds names a time."""
    if seconds < 600:
        return "%H:%M:%S"
    return "%H:%M" if seconds < 86400 else "%b %d, %H:%M"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
