"""The report in a browser: charts are drawn, samples are found and read, no text does anything."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page
from results_tree import HOSTILE, WordTokenizer, make_results

from draftstates.paths import Results
from draftstates.plan.words import of_share
from draftstates.report.gather import gather
from draftstates.report.page import Numbers, page

Show = Callable[..., Any]
MILLION = 1_000_000
MOST_BYTES = 5_000_000
LOOK = """() => ({
  charts: Object.fromEntries([...document.querySelectorAll(".chart")].map((place) => [
    place.id.replace("chart-", ""),
    [place.dataset.drawn, place.querySelectorAll("svg path, svg text").length],
  ])),
  failed: document.querySelectorAll(".failed").length,
  hacked: window.hacked === true,
  unnamed: [...document.querySelectorAll(".chart svg")]
    .filter((drawn) => !drawn.closest("[aria-label]")).length,
  wide: document.documentElement.scrollWidth - window.innerWidth,
})"""
DATA = {"lengths", "supervised", "shares", "turns", "coverage"}
CAPTURE = {"rates", "queue", "writing", "jobs", "disk", "stages", "margins", "parity", "norms"}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Return what the report of a small run shows."""
    folder = tmp_path_factory.mktemp("results")
    make_results(folder)
    return gather(Results(folder).plan, WordTokenizer(), captured=True)


def look(show: Show, folder: Path, content: Numbers, **options: Any) -> tuple[Page, set[str]]:
    """Open the page and return it with the names of its charts; no script may have failed."""
    path = folder / "index.html"
    path.write_text(page(content), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    shown = show(path, **options)
    found = shown.page.evaluate(LOOK)
    assert shown.faults == [] and shown.outside == [], shown
    assert not found["hacked"] and found["failed"] == found["unnamed"] == 0
    assert found["wide"] <= 0, "the page is wider than its window"
    bad = {name: state for name, state in found["charts"].items() if state[0] != "yes"}
    assert not bad and all(count > 2 for _, count in found["charts"].values())
    return shown.page, set(found["charts"])


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 420)])
def test_every_chart_is_drawn(
    show: Show, numbers: Numbers, tmp_path: Path, scheme: str, width: int
) -> None:
    seen, charts = look(show, tmp_path, numbers, color_scheme=scheme, width=width)
    assert charts == DATA | CAPTURE
    colour = seen.evaluate("getComputedStyle(document.querySelector('.chart svg text')).fill")
    assert colour == {"light": "rgb(93, 104, 120)", "dark": "rgb(152, 163, 179)"}[scheme]
    numbers_of_it = seen.locator(".chart + details").first
    numbers_of_it.locator("summary").click()
    numbers_of_it.locator("table tr").nth(2).wait_for()


def ids(seen: Page) -> list[str]:
    """Return the beginning of the id of each sample in the table."""
    return seen.locator("#samples-table tr.row code").all_inner_texts()


def test_samples_are_found_sorted_and_read(show: Show, numbers: Numbers, tmp_path: Path) -> None:
    seen, _ = look(show, tmp_path, numbers)
    first = ids(seen)
    assert len(first) == 15
    seen.get_by_label("Next page").click()
    assert not set(ids(seen)) & set(first)
    seen.get_by_label("Previous page").click()
    assert ids(seen) == first
    sample, search = numbers.samples[-1], seen.get_by_label("Search samples")
    search.fill(sample["id"])
    assert ids(seen) == [sample["id"][:8]]
    seen.locator("tr.row").click()
    supervised = [piece for turn in sample["turns"] for piece in turn if piece[2]]
    assert seen.locator("tr.open .on").count() == len(supervised) > 0
    assert seen.locator("tr.open .turn").count() == len(sample["turns"])
    assert seen.locator("tr.open span").first.get_attribute("title").startswith("token")
    search.fill("no sample has this word")
    assert ids(seen) == []
    search.fill("")
    seen.get_by_role("button", name="tokens").click()
    assert seen.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    least = min(sample["tokens"] for sample in numbers.samples)
    assert seen.locator("tr.row").first.locator("td").nth(3).inner_text() == f"{least:,}"


def test_a_sample_is_found_and_read_by_the_keyboard(
    show: Show, numbers: Numbers, tmp_path: Path
) -> None:
    seen, _ = look(show, tmp_path, numbers)
    seen.get_by_label("Search samples").focus()
    seen.keyboard.type(numbers.samples[3]["id"])
    focused = seen.locator(":focus")
    for _ in range(9):
        seen.keyboard.press("Tab")
        if focused.get_attribute("aria-expanded"):
            break
    for expanded in ("true", "false", "true"):
        seen.keyboard.press("Enter")
        assert focused.get_attribute("aria-expanded") == expanded, "the focus stays on the sample"
    assert seen.locator("tr.open").count() == 1


def test_a_sample_that_a_check_names_is_a_click_away(
    show: Show, numbers: Numbers, tmp_path: Path
) -> None:
    seen, _ = look(show, tmp_path, numbers)
    link = seen.locator("#trust a[data-sample]").first
    link.click()
    assert ids(seen) == [link.inner_text()[:8]]
    assert seen.locator("tr.open").count() == 1


def test_a_run_with_nothing_captured_has_its_data_and_samples(
    show: Show, numbers: Numbers, tmp_path: Path
) -> None:
    plan = Results(tmp_path).plan
    make_results(tmp_path)
    for capture in Results(tmp_path).captures():
        for path in (*capture.verified_folder.iterdir(), capture.manifest, capture.server):
            path.unlink()
    for path in Results(tmp_path).benchmark("x").parent.rglob("*.tsv"):
        path.unlink()
    for captured in (True, False):
        content = gather(plan, WordTokenizer(), captured=captured)
        seen, charts = look(show, tmp_path, content)
        assert charts == DATA
        assert len(ids(seen)) == 15


def test_a_page_of_a_million_samples_is_small_and_is_drawn(
    show: Show, numbers: Numbers, tmp_path: Path
) -> None:
    seen, charts = look(show, tmp_path, of_a_million(numbers))
    assert charts == DATA | CAPTURE
    assert len(ids(seen)) == 15


def test_numbers_that_are_not_finite_are_left_out(
    show: Show, numbers: Numbers, tmp_path: Path
) -> None:
    nothing = float("nan")
    shards = [{**shard, "alignment_share_of_limit": nothing} for shard in numbers.trust["shards"]]
    norms = copy.deepcopy(numbers.trust["norms"])
    norms["by_position"][0] |= {"low": nothing, "median": nothing, "high": float("inf")}
    trust = {**numbers.trust, "shards": shards, "norms": norms}
    _, charts = look(show, tmp_path, dataclasses.replace(numbers, trust=trust))
    assert charts == DATA | CAPTURE


def test_without_scripts_text_and_tables_are_there(
    show: Show, numbers: Numbers, tmp_path: Path
) -> None:
    path = tmp_path / "index.html"
    path.write_text(page(numbers), encoding="utf-8")
    seen = show(path, java_script_enabled=False).page
    assert seen.get_by_text("This browser runs no script").is_visible()
    assert seen.locator("svg.flow").is_visible() and seen.locator(".figure").count() == 5
    assert seen.get_by_role("heading", name="Checks").is_visible()
    assert not seen.locator(".chart, .bar").filter(visible=True).count(), "no empty places"


def of_a_million(numbers: Numbers) -> Numbers:
    """Return the numbers of a run with a million samples of 30 sources in 5,000 shards."""
    draw = np.random.default_rng(0)
    statistics = json.loads(json.dumps(numbers.statistics))
    (source,) = statistics["sources"].values()
    each = MILLION // 30
    for field in ("lengths", "supervised"):
        source[field]["counts"] = draw.multinomial(each, [1 / 41] * 41).tolist()
    source |= {"samples": each, "kept": each, "rows_in": each + 4, "tokens": each * 900}
    statistics["sources"] = {f"source {number}": source for number in range(30)}
    statistics["tokens"] = each * 900 * 30
    shards = [
        {
            **numbers.trust["shards"][0],
            "shard_id": f"{number:032x}",
            "alignment_share_of_limit": float(draw.random()),
        }
        for number in range(5000)
    ]
    entry = numbers.plan.shards[0]
    entries = tuple(dataclasses.replace(entry, shard_id=shard["shard_id"]) for shard in shards)
    jobs = [
        {**numbers.times["jobs"][-1], "name": f"{number:032x}", "start": number, "end": number + 9}
        for number in range(10_000)
    ]
    sample = max(numbers.samples, key=lambda sample: sample["tokens"])
    long = {**sample, "turns": sample["turns"] * 18}
    samples = [{**long, "id": f"{number:032x}"} for number in range(200)]
    return dataclasses.replace(
        numbers,
        plan=dataclasses.replace(numbers.plan, shards=entries),
        statistics=statistics,
        samples=samples,
        trust={**numbers.trust, "shards": shards},
        times={
            **numbers.times,
            "jobs": jobs,
            "disk": [{"at": number, "bytes": number} for number in range(5000)],
        },
    )


def test_hostile_text_is_shown_as_it_is(numbers: Numbers) -> None:
    text = page(numbers)
    head = text[: text.index('<script type="application/json"')]
    assert "&lt;script&gt;window.hacked" in head
    for part in (*HOSTILE[:2], *"\u202e\u2028\x00\x1b"):
        assert part not in text
    assert "⟨U+202E⟩ desrever" in text and HOSTILE[2] in text
    assert "49" not in text[text.index("{{") : text.index("{{") + 20]


def test_the_share_of_rows_with_reasoning_and_tools_is_shown(numbers: Numbers) -> None:
    (source,) = numbers.statistics["sources"].values()
    row = page(numbers).partition("rows with tools</th></tr>")[2].partition("</tr>")[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells[-2:] == [of_share(1 / source["conversations"]), "0 %"]
    unknown = {"demo": {**source, "conversations": 0}}
    of_tokens = dataclasses.replace(numbers, statistics={**numbers.statistics, "sources": unknown})
    assert page(of_tokens).count("not known") == 2


def test_a_broken_page_is_noticed(show: Show, tmp_path: Path) -> None:
    """The tests above would see a script that fails, and text that acts."""
    file = tmp_path / "broken.html"
    file.write_text(
        "<html><head></head><body><script>window.drawn = Promise.resolve()</script>"
        f"<img src=https://localhost/x.png>{HOSTILE[0]}<script>throw Error('planted')</script>"
    )
    shown = show(file)
    assert shown.page.evaluate("window.hacked")
    assert any("planted" in fault for fault in shown.faults)
    assert shown.outside == ["https://localhost/x.png"]
