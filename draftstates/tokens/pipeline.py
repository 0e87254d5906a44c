"""The work of one process: from a row of a source to its samples."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftstates.ids import keyed_fraction, sample_id
from draftstates.model.folder import ModelFolder
from draftstates.tokens.conversations import Conversation, TokenRow, parse_row
from draftstates.tokens.encoder import load_tokenizer
from draftstates.tokens.rows import Row, RowSkipped, shown
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.turns import Sample, tokenise_conversation

# most sets of rows' own arguments whose templates are kept
_VARIANTS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row: its samples, or the reason why it has no sample.

    Attributes:
        number: number of the row in its source.
        where: file and line (or row), for messages.
        samples: pairs (sample id, sample).
        skipped: reason why the row has no sample; None for a kept row.
        lost_turns: reasons why turns of a kept row are not in its samples.
        not_used: names of the columns, keys and content of a kept row that are in none of its
            samples.
    """

    number: int
    where: str
    samples: list[tuple[str, Sample]]
    skipped: RowSkipped | None = None
    lost_turns: tuple[str, ...] = ()
    not_used: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The tokenizer and the options by which a worker turns rows into samples."""

    tokenizer_path: Path
    options: TokeniseOptions

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template, loaded when it is first used.

        Raises:
            UserError: the tokenizer or its template cannot be used.
        """
        options = self.options
        return ChatTemplate(
            self.tokenizer_path,
            chat_template=options.chat_template,
            renderer=options.renderer,
            arguments=options.template_arguments,
            end_tokens=options.end_tokens,
            today=options.template_date,
            trust_remote_code=options.trust_remote_code,
        )

    @functools.cached_property
    def vocabulary(self) -> tuple[int, int | None]:
        """The number of token ids of the model, and its beginning-of-sequence token.

        A row of tokens needs no template, and its ids may be any that the model has. Only a folder
        without a model asks the tokenizer.

        Raises:
            UserError: the tokenizer is needed and cannot be loaded.
        """
        model = ModelFolder(self.tokenizer_path)
        if model.exists() and "vocab_size" in model.text:
            begin = model.text.get("bos_token_id", model.config.get("bos_token_id"))
            return model.vocab_size, begin if isinstance(begin, int) else None
        tokenizer = load_tokenizer(
            self.tokenizer_path, trust_remote_code=self.options.trust_remote_code
        )
        return len(tokenizer), tokenizer.bos_token_id

    def needs_template(self, rows: Sequence[Row]) -> bool:
        """Return whether a source that begins with these rows holds anything but tokens."""
        kinds = {self._kind(row) for row in rows}
        return TokenRow not in kinds or Conversation in kinds

    def _kind(self, row: Row) -> type | None:
        try:
            return type(self._parsed(row))
        except RowSkipped:
            return None

    def _parsed(self, row: Row) -> Conversation | TokenRow:
        return parse_row(
            row.value,
            layout=self.options.format,
            columns=self.options.columns,
            roles=self.options.roles,
        )

    def _template_for(self, conversation: Conversation) -> ChatTemplate:
        """Return the template, with the row's own arguments where it has some."""
        if not conversation.arguments:
            return self.template
        key = json.dumps(conversation.arguments, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= _VARIANTS:
                self._variants.clear()
            self._variants[key] = self.template.with_arguments(conversation.arguments)
        return self._variants[key]

    @functools.cached_property
    def _variants(self) -> dict[str, ChatTemplate]:
        return {}

    def process(self, row: Row) -> RowResult:
        """Turn a row into its samples.

        A bad row raises no error: the reason is in `skipped` of the result.
        """
        try:
            parsed = self._parsed(row)
            self._draw(parsed)
            not_used = set(parsed.not_used)
            if isinstance(parsed, TokenRow):
                samples, lost = [self._checked(parsed)], []
            else:
                samples, lost = tokenise_conversation(
                    parsed, self._template_for(parsed), self.options, not_used
                )
        except RowSkipped as skipped:
            return RowResult(row.number, row.where, [], skipped)
        except Exception as error:
            error.add_note(f"while tokenising {row.where}")
            raise
        named = [(sample_id(sample.input_ids, sample.loss_mask), sample) for sample in samples]
        return RowResult(
            row.number,
            row.where,
            named,
            lost_turns=tuple(error.reason for error in lost),
            not_used=tuple(sorted(not_used)),
        )

    def _draw(self, parsed: Conversation | TokenRow) -> None:
        if self.options.weight < 1:
            # what is chosen depends on the content alone, and not on the row's other columns
            fields = ("messages", "tools", "input_ids", "loss_mask")
            content = json.dumps(
                {name: getattr(parsed, name) for name in fields if hasattr(parsed, name)},
                sort_keys=True,
                default=str,
            )
            if keyed_fraction(content, key="draftstates.weight") >= self.options.weight:
                raise RowSkipped("not_sampled", f"outside the share of {self.options.weight}")

    def _checked(self, row: TokenRow) -> Sample:
        """Check a row that came as tokens: ids in range, a mask value for each, max_tokens."""
        ids, mask = row.input_ids, row.loss_mask
        size, bos = self.vocabulary
        if len(ids) != len(mask):
            raise RowSkipped("bad_tokens", f"{len(ids)} ids but {len(mask)} mask values")
        if not ids:
            raise RowSkipped("empty", "expected tokens, found none")
        for name, values, kinds, limit in (
            ("input_ids", ids, (int,), size),
            ("loss_mask", mask, (int, bool), 2),
        ):
            wrong = [
                value for value in values if type(value) not in kinds or not 0 <= value < limit
            ]
            if wrong:
                raise RowSkipped(
                    "bad_tokens",
                    f"{name}: expected whole numbers from 0 to {limit - 1}, found"
                    f" {shown(wrong[0])}",
                )
        if len(ids) > self.options.max_tokens:
            raise RowSkipped(
                "too_long", f"expected at most {self.options.max_tokens} tokens, found {len(ids)}"
            )
        if bos is not None and ids[:2] == [bos, bos]:
            raise RowSkipped("doubled_bos", f"the first two tokens are both {bos}")
        if not any(mask[1:]):
            raise RowSkipped(
                "no_supervised_tokens",
                f"none of {len(ids)} tokens after the first is supervised",
            )
        return Sample(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))
