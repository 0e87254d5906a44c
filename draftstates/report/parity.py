"""The page of parity: a bar for the distance of each layer, with its limit and its neighbours."""

import html
import math
from pathlib import Path

from draftstates.records import LayerParity, Parity

_CSS = Path(__file__).parent / "assets" / "page.css"
_COLUMNS = ("layer", "median", "worst row", "limit", "nearest neighbour", "1e-8 to 1; | the limit")
# of a layer that is given the captured rows before it, where that was computed
_ALONE = ("alone: median", "alone: limit", "alone: worst row")
# that the bars cover
_DECADES = 8


def parity_page(found: Parity) -> str:
    """Return a result as a page."""
    alone = any(layer.alone is not None for layer in found.layers)
    rows = "\n".join(f"<tr>{_cells(layer, alone=alone)}</tr>" for layer in found.layers)
    columns = (*_COLUMNS, *(_ALONE if alone else ()))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Parity</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_CSS.read_text(encoding='utf-8')}</style></head>",
        "<body><main><header>",
        f"<h1>{html.escape(f'Parity with the checkpoint: {found.result}')}</h1>",
        f"<p>{html.escape(_how(found))}</p></header>",
        f'<div class="card scroll"><table class="parity"><tr>{head}</tr>',
        f"{rows}</table></div></main></body></html>",
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
    numbers = [layer.median, layer.worst, layer.limit, nearest]
    bar = (
        f'<div class="track"><i style="width: {_place(layer.median):.0f}%"></i>'
        f'<b style="left: {_place(layer.limit):.0f}%"></b></div>'
    )
    cells = [html.escape(layer.layer), *map(_number, numbers), bar]
    if alone:
        cells += map(_number, (layer.alone, layer.alone_limit, layer.alone_worst))
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _place(value: float) -> float:
    """Return where a value lies on a bar, in percent of its length."""
    decade = math.log10(value) if value > 0 else -_DECADES
    return 100 * min(1.0, max(0.0, 1 + decade / _DECADES))
