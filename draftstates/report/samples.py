"""Text of a sample with its supervised tokens marked, for a terminal or as HTML."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from draftstates.errors import UserError, visible
from draftstates.tokens.files import open_tokens

_SUPERVISED, _CONTEXT, _RESET = "\x1b[30;42m", "\x1b[90m", "\x1b[0m"
_STYLE = (
    "<style>.sample{white-space:pre-wrap;font:14px/1.5 monospace;color:#666;border:1px solid"
    " #ccc;padding:1em;margin:1em 0}.sample"
    " b{font-weight:normal;color:#000;background:#bfe8bf}.sample"
    " i{font-style:normal;color:#b8b8b8}</style>"
)


def find_sample(
    path: Path, *, sample_id: str | None = None, row: int | None = None
) -> list[dict[str, Any]]:
    """Return the samples of a file of tokens whose id begins with `sample_id`, or those of a row.

    Returns:
        `row`, `part`, `sample_id`, `input_ids` [T] and `loss_mask` [T] of each.

    Raises:
        UserError: no such sample, or not a file of tokens.
    """
    file = open_tokens(path)
    for group in range(file.num_row_groups):
        names = file.read_row_group(group, columns=["sample_id", "row"])
        chosen = (
            pc.equal(names["row"], row)
            if sample_id is None
            else pc.starts_with(names["sample_id"], sample_id)
        )
        indices = np.flatnonzero(np.asarray(chosen))
        if len(indices):
            return file.read_row_group(group).take(indices).to_pylist()
    raise UserError(
        f"{path}: expected {f'row {row}' if sample_id is None else f'sample {sample_id}'}, found"
        " none"
    )


def spread_samples(path: Path, *, count: int) -> list[dict[str, Any]]:
    """Return at most `count` samples, evenly spread over a file of tokens, as `find_sample` does.

    Raises:
        UserError: no such sample, or not a file of tokens.
    """
    file = open_tokens(path)
    total = file.metadata.num_rows
    if not total:
        raise UserError(f"{path}: expected samples, found none")
    wanted = np.unique(np.linspace(0, total - 1, count).astype(int))
    found, first = [], 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        here = wanted[(wanted >= first) & (wanted < end)] - first
        if len(here):
            found += file.read_row_group(group).take(here).to_pylist()
        first = end
    return found


def marked(tokenizer: Any, sample: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the text of each sequence of tokens, and whether these are supervised.

    Args:
        tokenizer: transformers' tokenizer.
        sample: a sample with `input_ids` [T] and `loss_mask`, 0 or 1 [T].
    """
    input_ids, mask = sample["input_ids"], np.asarray(sample["loss_mask"], dtype=bool)
    starts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [
        (tokenizer.decode(input_ids[first:end]), bool(mask[first]))
        for first, end in zip(starts, starts[1:], strict=False)
    ]


def title(source: str, sample: dict[str, Any]) -> str:
    """Return a line that names a sample, its row and its tokens."""
    return (
        f"sample {sample['sample_id']}, row {sample['row']} of {source}:"
        f" {len(sample['input_ids'])} tokens,"
        f" {sum(sample['loss_mask'])} of them supervised"
    )


def as_document(source: str, sample: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a sample for JSON: its fields, and its text in pieces that are supervised or not."""
    pieces = [{"text": text, "supervised": mask} for text, mask in marked(tokenizer, sample)]
    return {"source": source, **sample, "pieces": pieces}


def page_of(found: list[tuple[str, dict[str, Any]]], tokenizer: Any) -> str:
    """Return an HTML page of samples.

    Args:
        found: name of the source and sample, as `find_sample` returns it.
        tokenizer: transformers' tokenizer.
    """
    return html_page(
        [
            as_html(marked(tokenizer, sample), title=title(source, sample))
            for source, sample in found
        ]
    )


def as_terminal(found: list[tuple[str, bool]], *, colour: bool) -> str:
    """Return text with supervised tokens on a coloured ground, or between ⟦ and ⟧.

    Ends of lines are shown.
    """
    parts = []
    for text, supervised in found:
        text = visible(text).replace("\n", "↵\n")
        # A terminal's colour must be set on every line.
        if colour:
            start = _SUPERVISED if supervised else _CONTEXT
            parts.append(start + text.replace("\n", f"{_RESET}\n{start}") + _RESET)
        else:
            parts.append(f"⟦{text}⟧" if supervised else text)
    return "".join(parts)


def as_html(found: list[tuple[str, bool]], *, title: str) -> str:
    """Return the sample as a piece of a page (see `html_page`); supervised tokens are in `<b>`."""
    parts = []
    for text, supervised in found:
        escaped = html.escape(visible(text)).replace("\n", "<i>↵</i>\n")
        parts.append(f"<b>{escaped}</b>" if supervised else escaped)
    return f'<h3>{html.escape(title)}</h3>\n<div class="sample">{"".join(parts)}</div>\n'


def html_page(samples: list[str]) -> str:
    """Return a page of samples made by `as_html`."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Samples</title>{_STYLE}'
    return f"{head}\n<p>Supervised tokens have a green ground.</p>\n{''.join(samples)}</html>\n"
