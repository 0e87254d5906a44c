"""The parser of a dataset's row: any of the usual layouts becomes one list of chat messages."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from draftstates.config import reserved_arguments
from draftstates.tokens.answers import AnswerJoiner
from draftstates.tokens.flags import RowFlags, endings, without_padding
from draftstates.tokens.layouts import CONTEXTS, RowLayout
from draftstates.tokens.messages import MessageReader
from draftstates.tokens.parts import REASONING_KEYS, ends_in_thought, is_setting
from draftstates.tokens.rows import RowSkipped, parse_json, shown
from draftstates.tokens.tools import from_json, is_empty, read_tools

_SYSTEM_COLUMNS = ("system", "system_prompt", "instructions")
_TOOL_COLUMNS = ("tools", "functions")
_SECOND_INPUTS = ("input", "context")


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a chat template takes it.

    Attributes:
        messages: messages with `role`, `content` and the other keys of the chat format; reasoning
            lies under `reasoning_content`.
        tools: tools that are offered to the model.
        arguments: the row's own arguments for the template.
        unsupervised: numbers of the messages that the row excludes from what is learnt.
        open_turns: numbers of the assistant messages that the model did not end itself, such as
            those cut at a limit.
        not_used: names of the row's keys and values that are in none of these.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    unsupervised: frozenset[int] = frozenset()
    open_turns: frozenset[int] = frozenset()
    not_used: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the accounting counts of its rows: conversations, those with reasoning or tools."""
        reasoning = any(
            message.get("reasoning_content") or "<think>" in str(message["content"])
            for message in self.messages
        )
        tools = self.tools or any(
            message["role"] == "tool" or message.get("tool_calls") for message in self.messages
        )
        return (
            "conversations",
            *(["with_reasoning"] if reasoning else []),
            *(["with_tools"] if tools else []),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that is already tokenised; its values are not checked yet.

    Attributes:
        input_ids: ids [T].
        loss_mask: 0 or 1 [T].
        not_used: names of the row's other columns.
    """

    input_ids: list[Any]
    loss_mask: list[Any]
    not_used: tuple[str, ...] = dataclasses.field(default=(), compare=False)


def parse_row(
    value: object,
    *,
    layout: str = "auto",
    columns: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
) -> Conversation | TokenRow:
    """Read a row's conversation or tokens.

    Args:
        value: the row's object, or its JSON text as bytes.
        layout: `format` of `config.RowOptions`; `auto` decides by the row's columns.
        columns: the source's names of columns (standard name -> the source's name).
        roles: the source's names of roles (its name -> role of the chat format).

    Raises:
        RowSkipped: the row holds no conversation and no tokens; the error has reason and detail.
    """
    if isinstance(value, RowSkipped):
        raise value
    if isinstance(value, bytes):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RowSkipped("broken_json", str(error)) from None
    if not isinstance(value, dict):
        raise RowSkipped("not_an_object", f"expected an object, found {shown(value)}")
    return _RowParser(value, columns or {}, roles or {}).parse(layout)


class _RowParser:
    """A row, the names of its columns, and those that have been read."""

    def __init__(
        self, row: dict[str, Any], columns: Mapping[str, str], roles: Mapping[str, str]
    ) -> None:
        self._row = row
        self._columns = columns
        self._layout = RowLayout(row, columns)
        self._reader = MessageReader(columns, roles)
        self._used: set[str] = set()
        self._flags = RowFlags(row, columns, self._used)

    def parse(self, layout: str) -> Conversation | TokenRow:
        is_auto = layout == "auto"
        if is_auto:
            layout = self._layout.layout()
        self._flags.check_wanted()
        if layout == "tokens":
            return self._read_tokens()
        if layout in ("messages", "sharegpt"):
            self._read_chat()
            if is_auto:
                self._layout.check_same(self._reader.messages)
        elif layout == "responses":
            self._read_responses()
        else:
            self._read_pair(layout)
        reader = self._reader
        self._flags.apply(reader)
        reader.open_turns.update(
            index for index, message in enumerate(reader.messages) if ends_in_thought(message)
        )
        answers = AnswerJoiner(reader.messages, reader.unsupervised, reader.open_turns)
        tools, arguments = self._tools(), self._arguments()
        return Conversation(
            answers.messages,
            tools,
            frozenset(answers.unsupervised),
            frozenset(answers.open_turns),
            self._not_used(),
            arguments,
        )

    def _read_tokens(self) -> TokenRow:
        ids, mask = self._column("input_ids", list), self._column("loss_mask", list)
        if self._flags.excludes():
            raise RowSkipped("no_supervised_tokens", "the row says that it is not to be learnt")
        if not is_empty(attention := self._take("attention_mask")):
            ids, mask = without_padding(ids, mask, attention)
        return TokenRow(ids, mask, self._not_used())

    def _name(self, standard: str) -> str:
        return self._columns.get(standard, standard)

    def _take(self, name: str) -> Any:
        self._used.add(name)
        return self._row.get(name)

    def _column(self, standard: str, kind: type) -> Any:
        name = self._name(standard)
        value = self._take(name)
        if not isinstance(value, kind):
            raise RowSkipped(
                "bad_columns", f"column {name}: expected {kind.__name__}, found {shown(value)}"
            )
        return value

    def _text(self, name: str) -> str:
        """Return a column's text; a missing one is empty."""
        value = self._take(name)
        if is_empty(value):
            return ""
        if not isinstance(value, str):
            raise RowSkipped("bad_columns", f"column {name}: expected text, found {shown(value)}")
        return value

    def _read_chat(self) -> None:
        columns = self._layout.message_columns()
        name = next((name for name in columns if not is_empty(self._row.get(name))), None)
        name = name or next((name for name in columns if name in self._row), "messages")
        listed = _list_of(self._take(name))
        if listed is None:
            raise RowSkipped(
                "bad_columns",
                f"column {name}: expected a list of messages, found {shown(self._row.get(name))}",
            )
        self._read_system()
        system = bool(self._reader.messages)
        self._read_list(listed, self._flags.learnt(len(listed)))
        self._read_choice()
        self._read_answer()
        if system and self._reader.messages[1:2] and self._reader.messages[1]["role"] == "system":
            first, second = self._reader.messages[:2]
            if first["content"] != second["content"]:
                raise RowSkipped(
                    "bad_columns", "a system prompt in the column and another in the messages"
                )
            self._drop_first()

    def _drop_first(self) -> None:
        reader = self._reader
        del reader.messages[0]
        reader.unsupervised = {index - 1 for index in reader.unsupervised}
        reader.open_turns = {index - 1 for index in reader.open_turns}

    def _read_list(self, items: Iterable[object], learnt: list[bool] | None = None) -> None:
        for index, item in enumerate(items):
            self._reader.read(item, index, learn=learnt is None or learnt[index])

    def _read_choice(self) -> None:
        """Read the answer of a chat completion that lies beside its request's messages."""
        choices = self._row.get("choices")
        if not isinstance(choices, list) or not choices:
            return
        messages = [
            choice.get("message") if isinstance(choice, dict) else None for choice in choices
        ]
        last = self._reader.messages[-1:]
        if len(choices) != 1 or not isinstance(messages[0], dict):
            raise RowSkipped(
                "bad_columns",
                f"column choices: expected one choice with a message, found {shown(choices)}",
            )
        if last and last[0]["role"] == "assistant":
            return
        self._used.add("choices")
        self._reader.read(messages[0], len(self._reader.messages))
        for key, reason in endings(choices[0]):
            self._reader.end_last(reason, f"choices[].{key}")

    def _read_answer(self) -> None:
        """Read the answer that a column holds to messages that end in a question."""
        name = self._layout.answer_column()
        last = self._reader.messages[-1:]
        if name is None or not last or last[0]["role"] not in ("user", "tool"):
            return
        for item in self._with_thoughts(self._side(name, "assistant")):
            self._reader.read(item, len(self._reader.messages))

    def _read_system(self) -> None:
        names = {self._name("system"): None, **dict.fromkeys(_SYSTEM_COLUMNS)}
        given = [name for name in names if not is_empty(self._row.get(name))]
        texts = []
        for name in given:
            value = self._take(name)
            if not isinstance(value, (str, list)):
                raise RowSkipped(
                    "bad_columns", f"column {name}: expected text, found {shown(value)}"
                )
            if value not in texts:
                texts.append(value)
        if len(texts) > 1:
            raise RowSkipped(
                "bad_columns", f"expected one system prompt, found another in {', '.join(given)}"
            )
        if texts:
            self._reader.read({"role": "system", "content": texts[0]}, 0)

    def _read_pair(self, layout: str) -> None:
        """Read a question and an answer, with what may stand before them."""
        if layout == "alpaca":
            question, answer = self._name("instruction"), self._name("output")
        else:
            found = self._layout.pair()
            question, answer = found or (self._name("prompt"), self._name("completion"))
        asked = self._side(question, "user")
        if listed := _messages_in(self._row[question]):
            asked = listed
        said = self._side(answer, "assistant")
        self._read_system()
        self._read_history()
        second = [name for name in (self._name("input"), *_SECOND_INPUTS[1:]) if name != question]
        for name in second:
            if question == self._name("instruction") and isinstance(self._row[question], str):
                text = self._text(name)
                asked[0]["content"] = "\n\n".join(filter(None, [asked[0]["content"], text]))
                if text:
                    break
        for name in ("input", *CONTEXTS):
            if not is_empty(self._row.get(name)) and name not in self._used:
                raise RowSkipped(
                    "unknown_format",
                    f"the columns {question} and {name} could both be of the question: name one in"
                    " columns, or put them into one",
                )
        said = self._with_thoughts(said)
        items = [*asked, *said]
        self._drop_doubled_system(items)
        self._read_list(items, self._flags.learnt(len(items)))

    def _with_thoughts(self, said: list[Any]) -> list[Any]:
        """Return an answer of columns with the thought that another column holds."""
        if len(said) != 1 or not isinstance(said[0], dict):
            # the thought is not used, and is named
            return said
        thoughts = {
            key: self._take(key)
            for key in REASONING_KEYS
            if key in self._row and not is_setting(key, self._row[key])
        }
        return [{**thoughts, **said[0]}]

    def _drop_doubled_system(self, items: list[Any]) -> None:
        first = self._reader.messages[:1]
        if not first or first[0]["role"] != "system" or not isinstance(items[0], dict):
            return
        if items[0].get("role") == "system":
            if items[0].get("content") != first[0]["content"]:
                raise RowSkipped(
                    "bad_columns", "a system prompt in the column and another in the messages"
                )
            del items[0]

    def _side(self, name: str, role: str) -> list[Any]:
        """Return the messages of one side of a pair: text, or a list of messages."""
        value = self._take(name)
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        if isinstance(value, dict) and "role" in value:
            return [value]
        if not isinstance(value, list) or not value:
            raise RowSkipped(
                "bad_columns",
                f"column {name}: expected text or a list of messages, found {shown(value)}",
            )
        return list(value)

    def _read_history(self) -> None:
        """Read earlier turns: pairs of question and answer, or messages."""
        name = self._name("history")
        if is_empty(self._row.get(name)):
            return
        turns = _list_of(self._take(name))
        for index, turn in enumerate(turns if turns is not None else [None]):
            if isinstance(turn, dict):
                self._reader.read(turn, index)
            elif (
                isinstance(turn, (list, tuple))
                and len(turn) == 2
                and all(side is None or isinstance(side, str) for side in turn)
            ):
                for role, text in zip(("user", "assistant"), turn, strict=True):
                    if text:
                        self._reader.read({"role": role, "content": text}, index)
            else:
                raise RowSkipped(
                    "bad_columns",
                    f"column {name}: expected pairs of question and answer, found"
                    f" {shown(self._row[name])}",
                )

    def _read_responses(self) -> None:
        """Read input and output of OpenAI's Responses."""
        asked, said = self._side("input", "user"), self._take("output")
        self._read_system()
        items = [*asked, *said]
        self._drop_doubled_system(items)
        self._read_list(items, self._flags.learnt(len(items)))

    def _tools(self) -> list[dict[str, Any]] | None:
        names = {self._name("tools"): None, **dict.fromkeys(_TOOL_COLUMNS)}
        given = [name for name in names if not is_empty(self._row.get(name))]
        # a second column stays unused, and is named
        return read_tools(self._take(given[0]), given[0]) if given else None

    def _arguments(self) -> dict[str, Any]:
        """Return the row's arguments for the template."""
        name = self._name("chat_template_kwargs")
        if is_empty(self._row.get(name)):
            return {}
        value = from_json(self._take(name))
        if not isinstance(value, dict) or reserved_arguments(value):
            raise RowSkipped(
                "bad_columns",
                f"column {name}: expected an object of arguments for the template, found"
                f" {shown(self._row[name])}",
            )
        return value

    def _not_used(self) -> tuple[str, ...]:
        row, used = self._row, self._used
        unused = [
            str(name) for name, value in row.items() if name not in used and not is_empty(value)
        ]
        return (*unused, *sorted(self._reader.not_used))


def _messages_in(value: object) -> list[dict[str, Any]]:
    """Return the messages of a question that is JSON text of a list of them; none for others."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return []
    listed = from_json(value)
    known = isinstance(listed, list) and all(
        isinstance(item, dict)
        and ({"role", "content"} <= set(item) or {"from", "value"} <= set(item))
        for item in listed
    )
    return listed if known else []


def _list_of(value: object) -> list[Any] | None:
    """Return a column's list: as it is, as JSON text, or as one list for each key."""
    value = from_json(value)
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        lengths = {len(part) for part in value.values()}
        if len(lengths) == 1:
            return [
                dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)
            ]
    return value if isinstance(value, list) else None
