"""The parts of a message's content: text, reasoning, calls and results of tools.

Parts have the types of OpenAI's chat format and Responses, and of Anthropic's blocks.
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
    "reasoning": "reasoning",
    "reasoning_text": "text",
    "summary_text": "text",
}


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
        keys = (_THOUGHTS[kind], "text")
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


def text_of(value: object) -> str | None:
    """Return the text of reasoning: text, or a list of parts; None for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    texts = []
    for part in value:
        if isinstance(part, dict):
            keys = ("text", "thinking", "summary")
            part = next((part[key] for key in keys if isinstance(part.get(key), str)), None)
        if not isinstance(part, str):
            return None
        texts.append(part)
    return "\n".join(texts)


def _name_keys(part: dict[str, Any], not_used: set[str], used: set[str]) -> None:
    not_used.update(
        f"messages[].content[].{key}"
        for key, value in part.items()
        if key not in used and not is_empty(value)
    )
