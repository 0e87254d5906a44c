"""The tables of what is read of a row name all that the code reads, and nothing else."""

import re

from token_kit import REPOSITORY

from draftstates.tokens import conversations, flags, layouts, messages, parts
from draftstates.tokens.rows import REASONS

PAGE = (REPOSITORY / "docs" / "data.md").read_text()
TABLES = PAGE.partition("## What is read of a row")[2].partition("\n## ")[0]
# names that the code reads
READ = {
    *messages.ROLES,
    *messages._ITEMS,
    *messages._CONTENT_KEYS,
    *(name for pair in layouts._PAIRS for name in pair),
    *layouts._MESSAGE_COLUMNS,
    *layouts.QUESTIONS,
    *layouts.ANSWERS,
    *layouts.CONTEXTS,
    *conversations._SYSTEM_COLUMNS,
    *conversations._TOOL_COLUMNS,
    *conversations._SECOND_INPUTS,
    *parts._TEXTS,
    *parts._THOUGHTS,
    *parts.REASONING_KEYS,
    *flags.FLAGS,
    *flags.ENDING_KEYS,
    *flags.HOLDERS,
    *flags._EXCLUDING,
}
# names in the tables that are read under no list of their own
ALSO = {
    *("role", "from", "message", "name", "channel", "tool_calls", "tool_call_id", "choices"),
    *("tool_use", "tool_result", "input_schema", "status", "history", "input_ids", "loss_mask"),
    *("attention_mask", "reasoning_details", "thinking_blocks", "weights", "mask_history", "mask"),
    *("finish_reasons", "columns", "format", "template_arguments", "off", "high"),
}


def test_the_tables_name_all_that_is_read() -> None:
    named = set(re.findall(r"`(\w+)(?:`|: )", TABLES))
    assert READ - named == set()


def test_the_tables_name_nothing_else() -> None:
    named = set(re.findall(r"`([a-zA-Z_]+)`", TABLES))
    assert named - READ - ALSO - set(REASONS) == set()
