"""The parts of a message: text, reasoning, calls and results of tools, under all their names.

Parts have the types of OpenAI's chat format and Responses, and of Anthropic's blocks. Reasoning has
several names. The same names may hold a setting of the request (`reasoning: off`), which is no
thought. An answer may hold its thought twice, in its text and in a field of its own.
"""

from typing import Any

from draftstates.tokens.rows import RowSkipped, shown
from draftstates.tokens.tools import is_empty, read_calls

# the key that holds what a part says, by the part's type
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_THOUGHTS = {
    "thinking": "thinking",
    "think": "think",
    "reasoning": "reasoning",
    "reasoning_text": "text",
    "summary_text": "text",
}
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


def read_block(part: object, role: str, where: str, not_used: set[str]) -> tuple[str, Any]:
    """Return the kind of a part (text, reasoning, call, result) and what it holds."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    kind = kind if isinstance(kind, str) else None
    if isinstance(part, dict) and kind in _TEXTS:
        key = _TEXTS[kind]
        text = part.get(key)
        if isinstance(text, dict):
            text = text.get("value")
        if isinstance(text, str):
            _name_keys(part, not_used, {"type", key})
            return "text", text
    elif isinstance(part, dict) and kind in _THOUGHTS and role == "assistant":
        keys = (_THOUGHTS[kind], "text", "content", "summary")
        text = next((text_of(part[key]) for key in keys if not is_empty(part.get(key))), "")
        if text is not None:
            _name_keys(part, not_used, {"type", *keys})
            return "reasoning", text
    elif isinstance(part, dict) and kind == "tool_use" and role == "assistant":
        _name_keys(part, not_used, {"type", "id", "name", "input"})
        call = {key: part.get(key) for key in ("id", "name")}
        return "call", read_calls([{**call, "arguments": part.get("input")}], where, not_used)
    elif isinstance(part, dict) and kind == "tool_result" and role in ("user", "tool"):
        _name_keys(part, not_used, {"type", "tool_use_id", "content"})
        return "result", result_message(
            part.get("content"), part.get("tool_use_id"), where, not_used
        )
    raise RowSkipped("bad_message", f"{where} ({role}): expected text, found {shown(part)}")


def result_message(
    content: object, call_id: object, where: str, not_used: set[str]
) -> dict[str, Any]:
    """Return the message of a tool's result."""
    if content is None:
        content = ""
    if isinstance(content, list):
        blocks = [read_block(part, "tool", where, not_used) for part in content]
        if any(kind != "text" for kind, _ in blocks):
            raise RowSkipped(
                "bad_message", f"{where}: expected text as result, found {shown(content)}"
            )
        content = joined([{"type": "text", "text": text} for _, text in blocks])
    if not isinstance(content, (str, list)):
        raise RowSkipped("bad_message", f"{where}: expected text as result, found {shown(content)}")
    message = {"role": "tool", "content": content}
    return message | ({"tool_call_id": call_id} if isinstance(call_id, str) else {})


def joined(texts: list[dict[str, str]]) -> Any:
    """Return parts as the chat format has them: one part is plain text."""
    if len(texts) > 1:
        return texts
    return texts[0]["text"] if texts else ""


def text_of(value: object, depth: int = 3) -> str | None:
    """Return the text of reasoning: text, a part or a list of parts; None for anything else.

    Args:
        value: the reasoning.
        depth: how deep parts may lie in each other.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        keys = ("text", "thinking", "think", "content", "summary")
        key = next((key for key in keys if not is_empty(value.get(key))), None)
        return text_of(value[key], depth - 1) if key and depth else None
    if not isinstance(value, list) or not depth:
        return None
    texts = [text_of(part, depth - 1) for part in value]
    return None if None in texts else "\n".join(filter(None, texts))


def _name_keys(part: dict[str, Any], not_used: set[str], used: set[str]) -> None:
    not_used.update(
        f"messages[].content[].{key}"
        for key, value in part.items()
        if key not in used and not is_empty(value)
    )


def is_setting(key: str, value: object) -> bool:
    """Return whether a key holds a setting of the request instead of a thought."""
    if key not in _SETTING_KEYS:
        return False
    if isinstance(value, str):
        return value.strip().lower() in _SETTINGS
    if isinstance(value, dict):
        # a summary of several parts is what was thought
        parts = any(isinstance(item, list) and item for item in value.values())
        return bool(value) and _SETTING_FIELDS.issuperset(value) and not parts
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


def ends_in_thought(message: dict[str, Any]) -> bool:
    """Return whether an answer opens a thought and does not close it, so that it was cut."""
    content = message["content"]
    return (
        message["role"] == "assistant"
        and isinstance(content, str)
        and content.lstrip().startswith("<think>")
        and "</think>" not in content
    )


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
