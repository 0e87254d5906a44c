"""Lengths at which a model changes what it computes: windows, chunks, the original rope length.

A prompt shorter than such a length says nothing about what lies beyond it.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftstates.model.family import rope_scalings, rope_type

# Keys of `config.json` whose value is such a length, in any family, at any depth.
_LENGTHS = re.compile(
    r"(\w+_)?(sliding|attention|local)?_?window(_size|_sizes|_length)?"
    r"|(\w+_)?chunk_(size|sizes|length)"
    r"|original_max_position_embeddings"
    r"|index_topk|dense_len|floor_scale|seq_length|(\w+_)?(sparse|kv|attn|attention)_block_size"
)
# A number of blocks, and beside it their size.
_BLOCKS = re.compile(r"(\w+_)?sparse_topk_blocks")
_BLOCK_SIZE = re.compile(r"(\w+_)?sparse_block_size")
_NOT_OF_ATTENTION = re.compile(
    r"quantization_config|compression_config|(vision|audio|speech|image|video)\w*|chunk_size_feed_forward"
)
# A prompt has so many tokens beyond the longest length.
SHORT = 64
# It has so many at least, where they fit: the rotary values of later positions may be wrong. On two
# cores the pass then takes about as long as the reading of the weights, however many these are.
USUAL = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """What a prompt of a length shows of a model.

    Attributes:
        covered: by key, each length that the prompt goes beyond.
        beyond: by key, each length that it does not.
    """

    covered: dict[str, int]
    beyond: dict[str, int]


def switch_length(text: Mapping[str, Any]) -> int | None:
    """Return the tokens beyond which all positions of a prompt are rotated otherwise, or None.

    LongRoPE has two sets of factors. SGLang takes the set for long prompts for a whole batch as
    soon as one of its positions lies beyond the length: then a short prompt's rows depend on its
    neighbours in the batch, and those of a long prompt on where its chunks end.

    Args:
        text: the language model's part of `config.json`.
    """
    longest = text.get("max_position_embeddings")
    for scaling in rope_scalings(text):
        key = "original_max_position_embeddings"
        original = scaling.get(key, text.get(key))
        if rope_type(scaling) not in ("longrope", "su") or type(original) is not int:
            continue
        if not isinstance(longest, int) or original < longest:
            return original
    return None


def prompt_length(text: Mapping[str, Any], *, most: int) -> int:
    """Return the tokens of a prompt that goes beyond every length at which a model changes.

    Args:
        text: the language model's part of `config.json`.
        most: tokens that a prompt may have; lengths that do not fit are left out.
    """
    room = min(most, text.get("max_position_embeddings") or most, switch_length(text) or most)
    fits = [value for value in lengths_that_matter(text).values() if value + SHORT <= room]
    return min(room, max(USUAL, max(fits, default=0) + SHORT))


def reach(text: Mapping[str, Any], *, tokens: int) -> Reach:
    """Return which of a model's lengths a prompt of so many tokens goes beyond."""
    found = lengths_that_matter(text)
    covered = {key: value for key, value in found.items() if value + SHORT <= tokens}
    return Reach(
        covered=covered, beyond={key: value for key, value in found.items() if key not in covered}
    )


def lengths_that_matter(text: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths by their keys, such as `rope_scaling.original_max_position_embeddings`.

    A length that no prompt of the model can reach is left out.
    """
    longest = text.get("max_position_embeddings")
    found = dict(_lengths(text, prefix=""))
    if text.get("use_sliding_window") is False:
        found = {key: value for key, value in found.items() if "sliding_window" not in key}
    if not isinstance(longest, int):
        # It is the longest prompt itself, then.
        found.pop("seq_length", None)
    else:
        found = {key: value for key, value in found.items() if value < longest}
    return found


def _lengths(part: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, int]]:
    sizes = [v for key, v in part.items() if _BLOCK_SIZE.fullmatch(key) and type(v) is int]
    for key, value in part.items():
        if _NOT_OF_ATTENTION.fullmatch(key):
            continue
        if isinstance(value, Mapping):
            yield from _lengths(value, prefix=f"{prefix}{key}.")
        elif _BLOCKS.fullmatch(key) and type(value) is int and sizes:
            yield f"{prefix}{key}", value * max(sizes)
        elif _LENGTHS.fullmatch(key):
            numbers = value if isinstance(value, list) else [value]
            whole = [number for number in numbers if type(number) is int and number > 1]
            if whole:
                yield f"{prefix}{key}", max(whole)
