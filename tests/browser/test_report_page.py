"""The report in a browser: charts are drawn, samples are found and read, no text does anything."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from results_tree import HOSTILE, WordTokenizer, make_results

from draftstates.paths import Results
from draftstates.plan.words import of_share
from draftstates.report.gather import gather
from draftstates.report.page import Numbers, page

MILLION = 1_000_000
MOST_BYTES = 5_000_000
LOOK = """
const rows = () => [...document.querySelectorAll("#samples-table tr.row")];
const first = () => rows()[0]?.querySelector("code").textContent;
const type = (text) => {
  const search = document.getElementById("samples-search");
  search.value = text;
  search.dispatchEvent(new Event("input"));
};
const found = {
  charts: Object.fromEntries([...document.querySelectorAll(".chart")].map((place) => [
    place.id.replace("chart-", ""),
    [place.dataset.drawn, place.querySelectorAll("svg path, svg text").length],
  ])),
  failed: document.querySelectorAll(".failed").length,
  hacked: window.hacked === true,
  label: getComputedStyle(document.querySelector(".chart svg text") ?? document.body).fill,
  outside: performance.getEntriesByType("resource").map((entry) => entry.name),
  wide: document.documentElement.scrollWidth - window.innerWidth,
  rows: rows().length,
  first: first(),
};
document.getElementById("samples-next").click();
found.second = first();
document.getElementById("samples-back").click();
found.back = first();
const id = samples.at(-1).id;
type(id);
found.searched = rows().map((row) => row.querySelector("code").textContent);
found.id = id;
rows()[0].click();
const open = document.querySelector("#samples-table tr.open");
found.open = {
  turns: open.querySelectorAll(".turn").length,
  supervised: open.querySelectorAll(".on").length,
  expected: samples.at(-1).turns.flat().filter((piece) => piece[2]).length,
  title: open.querySelector("span").title,
};
type("no sample has this word");
found.nothing = rows().length;
type("");
document.querySelector('th[data-sort="tokens"] button').click();
found.least = Number(rows()[0].querySelectorAll("td")[3].textContent.replaceAll(",", ""));
const numbers = document.querySelector(".chart + details");
numbers.open = true;
return new Promise((done) => setTimeout(done, 100)).then(() => {
  found.numbers = numbers.querySelectorAll("table tr").length;
  return found;
});
"""
DATA = {"lengths", "supervised", "shares", "turns", "coverage"}
CAPTURE = {"rates", "queue", "writing", "jobs", "disk", "stages", "margins", "parity", "norms"}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Return what the report of a small run shows."""
    folder = tmp_path_factory.mktemp("results")
    make_results(folder)
    return gather(Results(folder).plan, WordTokenizer(), captured=True)


def look(ask: Any, folder: Path, content: Numbers, **options: bool) -> dict[str, Any]:
    """Write the page and return what the browser sees; no script may have failed."""
    path = folder / "index.html"
    path.write_text(page(content), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    found = ask(path, LOOK, **options)
    assert found.get("error") is None and found["faults"] == [], found
    assert not found["hacked"] and found["failed"] == 0
    assert found["outside"] == [], "the page loads something"
    assert found["wide"] <= 0, "the page is wider than its window"
    bad = {name: state for name, state in found["charts"].items() if state[0] != "yes"}
    assert not bad and all(count > 2 for _, count in found["charts"].values())
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_are_drawn_and_samples_are_found_and_read(
    ask: Any, numbers: Numbers, tmp_path: Path, dark: bool
) -> None:
    found = look(ask, tmp_path, numbers, dark=dark)
    assert set(found["charts"]) == DATA | CAPTURE
    assert found["label"] == ("rgb(152, 163, 179)" if dark else "rgb(93, 104, 120)")
    assert found["rows"] == 15 and found["second"] not in (None, found["first"])
    assert found["back"] == found["first"]
    assert found["searched"] == [found["id"][:8]]
    opened = found["open"]
    assert opened["turns"] >= 1 and opened["title"].startswith("token")
    assert opened["supervised"] == opened["expected"] > 0
    assert found["nothing"] == 0
    assert found["least"] == min(sample["tokens"] for sample in numbers.samples)
    assert found["numbers"] > 2


def test_a_run_with_nothing_captured_has_its_data_and_samples(
    ask: Any, numbers: Numbers, tmp_path: Path
) -> None:
    plan = Results(tmp_path).plan
    make_results(tmp_path)
    for capture in Results(tmp_path).captures():
        for path in (*capture.verified_folder.iterdir(), capture.manifest, capture.server):
            path.unlink()
    for path in Results(tmp_path).benchmark("x").parent.rglob("*.tsv"):
        path.unlink()
    found = look(ask, tmp_path, gather(plan, WordTokenizer(), captured=True))
    assert set(found["charts"]) == DATA
    alone = look(ask, tmp_path, gather(plan, WordTokenizer(), captured=False))
    assert set(alone["charts"]) == DATA


def test_a_page_of_a_million_samples_is_small_and_is_drawn(
    ask: Any, numbers: Numbers, tmp_path: Path
) -> None:
    found = look(ask, tmp_path, of_a_million(numbers))
    assert set(found["charts"]) == DATA | CAPTURE


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


def test_a_broken_page_is_noticed(ask: Any, tmp_path: Path) -> None:
    """The tests above would see a script that fails, and text that acts."""
    page_file = tmp_path / "broken.html"
    page_file.write_text(
        "<html><head></head><body><script>window.drawn = Promise.reject(Error('no chart'));"
        f"</script>{HOSTILE[0]}<script>throw Error('planted')</script></body></html>"
    )
    found = ask(page_file, "return { hacked: window.hacked === true };")
    assert found["hacked"]
    assert any("planted" in fault for fault in found["faults"])
