"""Parity as people see it: layers beside their limits, and each layer alone where it was judged."""

import dataclasses

from captured import parity_of
from synthetic import capture_spec

from draftstates.records import Parity
from draftstates.report.charts import of_parity
from draftstates.report.parity import parity_page


def found(*, alone: bool) -> Parity:
    result = parity_of(capture_spec())
    if alone:
        return result
    names = ("alone", "alone_limit", "alone_worst", "alone_worst_limit")
    layers = [dataclasses.replace(layer, **dict.fromkeys(names)) for layer in result.layers]
    return dataclasses.replace(result, layers=tuple(layers))


def test_the_page_has_each_layer_alone() -> None:
    text = parity_page(found(alone=True))
    assert "<th>alone: median</th><th>alone: limit</th><th>alone: worst row</th>" in text
    assert "<td>0.0002</td><td>0.0006</td><td>0.0004</td></tr>" in text
    assert "alone" not in parity_page(found(alone=False)).lower()


def test_the_chart_has_each_layer_alone() -> None:
    def drawn(result: Parity) -> dict[str, float]:
        chart = of_parity([vars(layer) for layer in result.layers])
        return {row["what"]: row["distance"] for row in chart["data"]["values"]}

    together = {"median row": 1e-3, "worst row": 2e-3, "limit of the median": 0.03}
    assert drawn(found(alone=False)) == together
    alone = {"alone, median row": 2e-4, "alone, limit": 6e-4}
    assert drawn(found(alone=True)) == together | alone
