"""Samples that a page shows: a keyed selection and all that a check names, token by token."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftstates.errors import visible
from draftstates.tokens.files import open_tokens

# bytes of all shown samples as JSON, and the longest sample that is shown whole
_MOST_BYTES = 2_500_000
_MOST_TOKENS, _HEAD_TOKENS = 3000, 2500
_SELECTED = 200
_HELD_IDS = 8
_ROLE = re.compile(
    r"system|developer|user|human|assistant|model|bot|tool|function|observation|ipython|environment"
    r"|\[/?INST\]",
    re.IGNORECASE,
)
# tokens in which the name of a role follows the token that begins a turn
_ROLE_TOKENS = 2


def choose(
    tokens: Mapping[str, Path], *, named: Collection[str] = (), count: int = _SELECTED
) -> list[tuple[str, dict[str, Any]]]:
    """Return the named samples, then samples that are chosen by their ids, evenly by source.

    Sample ids are hashes, so the least of them are a random selection that stays the same.

    Args:
        tokens: `<source>.parquet` of each source.
        named: sample ids to return first.
        count: number of samples beside the named ones.

    Returns:
        name of the source, and sample as `find_sample` returns it.

    Raises:
        UserError: not a file of tokens.
    """
    wanted = set(named)
    each = max(1, count // max(len(tokens), 1))
    found: list[tuple[str, dict[str, Any]]] = []
    for source, path in tokens.items():
        with open_tokens(path) as file:
            ids = file.read(columns=["sample_id"])["sample_id"].to_pylist()
            least = np.argsort(np.array(ids, dtype="S32"), kind="stable")[:each].tolist()
            chosen = {*least, *(row for row, name in enumerate(ids) if name in wanted)}
            found += [(source, sample) for sample in _take(file, sorted(chosen))]
    return sorted(
        found, key=lambda item: (item[1]["sample_id"] not in wanted, item[1]["sample_id"])
    )


def _take(file: Any, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    first = 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        here = [row - first for row in rows if first <= row < end]
        if here:
            yield from file.read_row_group(group).take(pa.array(here)).to_pylist()
        first = end


def shown_samples(
    chosen: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: Any,
    *,
    why: Mapping[str, tuple[str, bool]],
    most_bytes: int = _MOST_BYTES,
) -> list[dict[str, Any]]:
    """Return samples as the page holds them, as many as fit into `most_bytes` of the page.

    Args:
        chosen: as `choose` returns them.
        tokenizer: transformers' tokenizer.
        why: by sample id, why a check names the sample, and whether it refuses it.

    Returns:
        for each: `id`, `source`, `row`, `tokens`, `supervised`, `why`, `refused`, `left_out`
        (tokens in its middle that are not shown), and `turns`, each a list of
        [text, ids, supervised].
    """
    found, size = [], 0
    for source, sample in chosen:
        ids, mask = sample["input_ids"], sample["loss_mask"]
        left_out = max(0, len(ids) - _MOST_TOKENS)
        tail = len(ids) - (_MOST_TOKENS - _HEAD_TOKENS)
        parts = [(0, _HEAD_TOKENS), (tail, len(ids))] if left_out else [(0, len(ids))]
        reason, refused = why.get(sample["sample_id"], ("", False))
        entry = {
            "id": sample["sample_id"],
            "source": visible(source),
            "row": sample["row"],
            "tokens": len(ids),
            "supervised": int(sum(mask)),
            "why": visible(reason),
            "refused": refused,
            "left_out": left_out,
            "turns": [
                turn
                for first, end in parts
                for turn in turns(tokenizer, ids[first:end], mask[first:end])
            ],
        }
        text = json.dumps(entry, ensure_ascii=False)
        size += len(text.encode(errors="surrogatepass"))
        # each of these takes six bytes in the page
        size += 5 * sum(map(text.count, "<>&"))
        if size > most_bytes and found:
            break
        found.append(entry)
    return found


def turns(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[list[list[Any]]]:
    """Return a sample's tokens turn by turn: [text, ids, supervised] of each piece.

    A turn begins with a special token that names a role, or is followed by the name of one.
    """
    special = set(getattr(tokenizer, "all_special_ids", [])) | set(
        getattr(tokenizer, "added_tokens_decoder", {})
    )
    parts = pieces(tokenizer, ids)
    found: list[list[list[Any]]] = [[]]
    at = 0
    for number, (text, of_piece) in enumerate(parts):
        if of_piece[0] in special and found[-1]:
            ahead = "".join(part for part, _ in parts[number : number + 1 + _ROLE_TOKENS])
            if _ROLE.search(ahead.split("\n")[0]):
                found.append([])
        found[-1].append([visible(text), of_piece, int(mask[at])])
        at += len(of_piece)
    return found


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return the text of each token, of several together where one is a part of a character.

    A token's text depends on the tokens before it, so each is decoded behind the last piece.
    """
    found: list[tuple[str, list[int]]] = []
    context: list[int] = []
    before, held = "", []
    for token in map(int, ids):
        held.append(token)
        text = tokenizer.decode([*context, *held])
        if text.endswith("�") and len(held) < _HELD_IDS:
            continue
        found.append((text[len(before) :] if text.startswith(before) else text, held))
        context, held = held, []
        before = tokenizer.decode(context)
    if held:
        found.append((tokenizer.decode([*context, *held])[len(before) :], held))
    return found
