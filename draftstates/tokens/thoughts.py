"""The reasoning of an answer, under the names that data sets give it.

The same names may hold a setting of the request (`reasoning: off`), which is no thought. An answer
may hold its thought twice, in its text and in a field of its own.
"""

from typing import Any

from draftstates.tokens.blocks import text_of
from draftstates.tokens.rows import RowSkipped, shown
from draftstates.tokens.tools import is_empty

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# names that requests use too
_SETTING_KEYS = ("reasoning", "thinking")
_SETTINGS = frozenset(
    (
        *("on", "off", "yes", "no", "true", "false", "0", "1"),
        *("enable", "enabled", "disable", "disabled"),
        *("auto", "adaptive", "default", "none", "null"),
        *("minimal", "low", "medium", "high", "xhigh", "max"),
        *("think", "thinking", "no_think", "nothink"),
    )
)
_SETTING_FIELDS = frozenset(
    (
        *("effort", "summary", "generate_summary", "enabled", "exclude", "max_tokens"),
        *("type", "budget_tokens", "display"),
    )
)


def is_setting(key: str, value: object) -> bool:
    """Return whether a key holds a setting of the request instead of a thought."""
    if key not in _SETTING_KEYS:
        return False
    if isinstance(value, str):
        return value.strip().lower() in _SETTINGS
    if isinstance(value, dict):
        return bool(value) and _SETTING_FIELDS.issuperset(value)
    return isinstance(value, (bool, int, float))


def read_thoughts(item: dict[str, Any], where: str) -> dict[str, str]:
    """Return a message's reasoning by its key; names that say the same are one.

    Args:
        item: the message.
        where: the message, for messages.

    Raises:
        RowSkipped: `bad_message`: it is no text, or two names say different things.
    """
    found: dict[str, str] = {}
    for key in REASONING_KEYS:
        value = item.get(key)
        if is_empty(value) or is_setting(key, value):
            continue
        text = text_of(value)
        if text is None:
            raise RowSkipped("bad_message", f"{where}: {key}: expected text, found {shown(value)}")
        found[key] = text
    if len({text.strip() for text in found.values()}) > 1:
        raise RowSkipped(
            "bad_message",
            f"{where}: expected one reasoning, found another in each of {', '.join(found)}",
        )
    for key in ("reasoning_details", "thinking_blocks"):
        blocks = item.get(key)
        text = text_of(blocks) if isinstance(blocks, list) else None
        if text and (not found or text.strip() == next(iter(found.values())).strip()):
            found[key] = text
    # all say the same; the later names are dropped
    return dict(list(found.items())[:1]) | dict.fromkeys(list(found)[1:], "")


def one_thought(thoughts: list[str], others: list[str], where: str) -> list[str]:
    """Return the thoughts of a message that may give them in fields and in blocks.

    Raises:
        RowSkipped: `bad_message`: both have thoughts, and they differ.
    """
    one, other = ("\n".join(filter(None, found)).strip() for found in (thoughts, others))
    if one and other and one != other:
        raise RowSkipped(
            "bad_message", f"{where}: expected one reasoning, found another in the blocks"
        )
    return thoughts if one else others


def without_thought(content: str, thought: str, where: str) -> str:
    """Return an answer's text without the thought that is given in a field too.

    Args:
        content: the text, which may begin with the thought in tags.
        thought: the thought of the field.
        where: the message, for messages.

    Raises:
        RowSkipped: `bad_message`: the text begins with another thought.
    """
    before, closer, rest = content.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    if not opened and (not closer or "<think>" in before):
        # no thought, or text about the tags
        return content
    told = before.strip().removeprefix("<think>").strip()
    if told == thought.strip():
        return rest.lstrip("\n")
    if not told and closer:
        # the empty thought of a template
        return rest.lstrip("\n")
    raise RowSkipped(
        "bad_message",
        f"{where}: expected one reasoning, found another in the content's <think>: {shown(told)}",
    )
