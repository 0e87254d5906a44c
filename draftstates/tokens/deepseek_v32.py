"""DeepSeek-V3.2's encoding of conversations, which the model's tokenizer has no template for.

The text is the one that the model's own `encoding_dsv32.py` and SGLang write: a user's message and
the last result of a call open the assistant's turn, so there is no generation prompt to add.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_DSML = "｜DSML｜"
_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{_DSML}function_calls>" block like the following as part of your reply to the user:
<{_DSML}function_calls>
<{_DSML}invoke name="$FUNCTION_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
<{_DSML}invoke name="$FUNCTION_NAME2">
...
</{_DSML}invoke>
</{_DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{_DSML}function_calls>
...
</{_DSML}function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{{schemas}}
</functions>
"""  # noqa: E501 (the text that the model was trained with)


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    thinking: bool,
) -> str:
    """Return a conversation as text.

    Args:
        messages: messages of the chat format, with text as content and objects as arguments.
        tools: tools of the chat format; the first system message, or an empty one, holds them.
        thinking: whether the model thinks before it answers the last user.

    Raises:
        ValueError: a result without a call, or an assistant's message that has neither thought nor
            call where the model thinks.
    """
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    last_user = max(
        (
            index
            for index, message in enumerate(messages)
            if message["role"] in ("user", "developer")
        ),
        default=-1,
    )
    parts = [_BEGIN]
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"] or ""
        if role == "system":
            parts.append(content + (_tools(tools) if tools and index == 0 else ""))
        elif role in ("user", "developer"):
            # the developer's message is the user's, with a heading
            shown = f"\n\n# The user's message is: {content}" if role == "developer" else content
            parts.append(f"<｜User｜>{shown}<｜Assistant｜>{_opener(index >= last_user, thinking)}")
        elif role == "tool":
            parts.append(_result(messages, index, opener=_opener(index >= last_user, thinking)))
        elif role == "assistant":
            parts.append(_answer(message, content, thinking=thinking and index > last_user))
        else:
            raise ValueError(f"unknown role {role}")
    return "".join(parts)


def _opener(last: bool, thinking: bool) -> str:
    return "<think>" if last and thinking else "</think>"


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    schemas = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    return "\n\n" + _TOOLS.replace("{schemas}", schemas)


def _answer(message: Mapping[str, Any], content: str, *, thinking: bool) -> str:
    calls, thought = message.get("tool_calls") or [], message.get("reasoning_content")
    if thinking and not (calls or thought):
        raise ValueError("with thinking, the answer to the last user needs reasoning or tool calls")
    before = f"{thought or ''}</think>" if thinking else ""
    return before + content + (_calls(calls) if calls else "") + _END


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    shown = "\n".join(
        f'<{_DSML}invoke name="{call["function"]["name"]}">\n'
        + "\n".join(
            f'<{_DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else _json(value)}</{_DSML}parameter>"
            for key, value in call["function"]["arguments"].items()
        )
        + f"\n</{_DSML}invoke>"
        for call in calls
    )
    return f"\n\n<{_DSML}function_calls>\n{shown}\n</{_DSML}function_calls>"


def _result(messages: Sequence[Mapping[str, Any]], index: int, *, opener: str) -> str:
    """Return the result of a call; the first opens the block, the last closes it."""
    caller = index - 1
    while caller >= 0 and messages[caller]["role"] == "tool":
        caller -= 1
    calls = len(messages[caller].get("tool_calls") or []) if caller >= 0 else 0
    place = index - caller
    if place > calls:
        raise ValueError("a tool's result without a call")
    before = "\n\n<function_results>" if place == 1 else ""
    after = f"\n</function_results>\n\n{opener}" if place == calls else ""
    return f"{before}\n<result>{messages[index]['content'] or ''}</result>{after}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
