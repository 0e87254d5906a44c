"""Why a row gives no sample: a closed list, so that the accounting can be read."""

REASONS = {
    "broken_json": "the row is not valid JSON",
    "not_an_object": "the row is not an object with named columns",
    "unknown_format": "none of the known column layouts fits the row",
    "bad_columns": "a column does not hold what it must",
    "empty": "there are no messages",
    "bad_message": "a message is not an object with a role and text",
    "unknown_role": "a message has a role that is none of the known ones",
    "bad_tools": "the tools or tool calls are not what the chat format allows",
    "bad_text": "the text holds lone surrogates, which no tokenizer can encode",
    "no_assistant": "there is no assistant turn with a message before it",
    "not_rendered": "the chat template would leave something out without a word: a role, the tools or the tool calls",
    "template_error": "the chat template refused the conversation",
    "prompt_not_prefix": "the template's generation prompt is not the beginning of the turn as the template renders it",
    "no_turn_end": "the template does not close an assistant turn with an end token",
    "rewritten_history": "the template renders a turn in another way once it is history, and the configuration says skip",
    "no_targets": "no token is a target, but perhaps the first, which nothing precedes",
    "doubled_bos": "the sample begins with two beginning-of-sequence tokens",
    "bad_tokens": "token ids or mask are not numbers in range, or differ in length",
    "too_long": "more tokens than max_tokens",
    "duplicate": "another row of the source gave the same tokens and targets",
    "not_sampled": "left out by the source's weight",
}

# Reasons that say nothing about the row's quality; they do not count towards `max_skipped_fraction`.
BENIGN = frozenset({"too_long", "duplicate", "not_sampled"})


class RowSkipped(Exception):
    """A row that gives no sample: `reason` is a key of `REASONS`, `detail` says what was expected and found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)  # both, or it could not travel between processes
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def shown(value: object, limit: int = 60) -> str:
    """`repr` of a value from a dataset, short enough for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
