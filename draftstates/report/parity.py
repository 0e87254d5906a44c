"""The page of parity: a bar for the distance of each layer, with its limit and its neighbours."""

import html
import math

from draftstates.records import LayerParity, Parity

_STYLE = (
    "<style>body{font:14px sans-serif}td,th{padding:.1em .8em;text-align:left}"
    "td:nth-child(n+2):nth-child(-n+4){text-align:right}</style>"
)
_COLUMNS = ("layer", "median", "worst row", "limit", "nearest neighbour", "1e-8 … 1")
# of a layer that is given the captured rows before it, where that was computed
_ALONE = ("alone: median", "alone: limit", "alone: worst row")
# Decades that the bars cover, and characters of a decade.
_DECADES, _WIDTH = 8, 5


def parity_page(found: Parity) -> str:
    """Return a result as a page."""
    alone = any(layer.alone is not None for layer in found.layers)
    rows = "".join(f"<tr>{_cells(layer, alone=alone)}</tr>" for layer in found.layers)
    columns = (*_COLUMNS, *(_ALONE if alone else ()))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    title = f"Parity with the checkpoint: {found.result}"
    lines = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Parity</title>{_STYLE}',
        f"<h3>{html.escape(title)}</h3>",
        f"<p>{html.escape(_how(found))}</p>",
        f"<table><tr>{head}</tr>{rows}</table></html>",
    ]
    return "\n".join(lines) + "\n"


def _how(found: Parity) -> str:
    said = [f"Distance of captured rows over a row's norm; computed by {found.reference}."]
    if any(layer.alone is not None for layer in found.layers):
        said.append(
            "Alone: the checkpoint's layer, given the captured rows before it; roundings of the"
            " layers before do not add up there."
        )
    for what, lengths in (("goes beyond", found.covered), ("does not reach", found.beyond)):
        if lengths:
            names = ", ".join(f"{key} {value:,}" for key, value in lengths.items())
            said.append(f"The prompt {what} {names}.")
    if found.unreached:
        names = "; ".join(f"{layer} {experts}" for layer, experts in found.unreached.items())
        said.append(f"Its tokens reach no expert of these, which were not compared: {names}.")
    return " ".join(said)


def _cells(layer: LayerParity, *, alone: bool) -> str:
    nearest = min(layer.neighbours.values(), default=None)
    bar = "█" * max(0, round(_WIDTH * (_DECADES + _decade(layer.median))))
    cells = [
        layer.layer,
        f"{layer.median:.2g}",
        f"{layer.worst:.2g}",
        f"{layer.limit:.2g}",
        "" if nearest is None else f"{nearest:.2g}",
        bar,
    ]
    if alone:
        values = (layer.alone, layer.alone_limit, layer.alone_worst)
        cells += ["" if value is None else f"{value:.2g}" for value in values]
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)


def _decade(value: float) -> float:
    return math.log10(value) if value > 0 else -_DECADES
