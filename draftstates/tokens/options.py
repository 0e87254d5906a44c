"""What the configuration's `data` section says about tokenising."""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.tokens.template import TODAY

FORMATS = ("auto", "messages", "sharegpt", "alpaca", "completion", "tokens")
_CHOICES = {"over_long": ("skip", "cut"), "train_on": ("all", "last"), "rewritten_history": ("split", "last", "skip"), "format": FORMATS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokeniseOptions:
    """How one source becomes samples.

    Attributes:
        max_tokens: longest sample; a longer one is skipped, or cut at the end of a turn (`over_long`).
        deduplicate: skip a sample with the same tokens and mask as an earlier one of the source.
        train_on: `all` assistant turns are targets, or the `last` alone.
        include_reasoning: reasoning tokens are targets (they are rendered in any case as the template does).
        rewritten_history: turns whose tokens are not a prefix of the later turns' (Qwen3 drops earlier thoughts) go into
            samples of their own (`split`), all but the last are left out (`last`), or the row is skipped (`skip`).
        chat_template: a Jinja file instead of the tokenizer's own template.
        template_arguments: passed to the template, such as `enable_thinking`.
        template_date: YYYY-MM-DD, the date that templates which write today's are told, so that the ids are the same on any day.
        end_tokens: tokens that end a turn, beyond those that the model's own files name.
        trust_remote_code: run the Python code in the tokenizer's folder, where it is made of that.
        max_skipped_fraction: bad rows beyond this share of the rows read stop the run.
        format, columns: the source's layout, and what it calls the columns (our name -> its name).
        limit: read only so many rows. weight: share of the rows that is kept, chosen by their content.
    """

    max_tokens: int
    over_long: str = "skip"
    deduplicate: bool = True
    train_on: str = "all"
    include_reasoning: bool = True
    rewritten_history: str = "split"
    chat_template: Path | None = None
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template_date: str = TODAY.isoformat()
    end_tokens: tuple[str, ...] = ()
    trust_remote_code: bool = False
    max_skipped_fraction: float = 0.2
    format: str = "auto"
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limit: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise UserError(f"data: {field} must be one of {', '.join(choices)}, found {getattr(self, field)!r}")
        try:
            datetime.date.fromisoformat(self.template_date)
        except ValueError:
            raise UserError(f"data: template_date must be a date such as {TODAY}, found {self.template_date!r}") from None
        if self.max_tokens < 2:
            raise UserError(f"data: max_tokens must be at least 2, found {self.max_tokens}")
        if not 0 < self.weight <= 1:
            raise UserError(f"data: weight must be above 0 and at most 1, found {self.weight}")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data: limit must be at least 1, found {self.limit}")


def source_options(config: Mapping[str, Any], source: str) -> tuple[list[Path], TokeniseOptions]:
    """Files and options of one source, out of the configuration's `data` section; `model.trust_remote_code` counts too.

    Raises:
        UserError: no such source, or a wrong value.
    """
    data = config["data"]
    known = {entry["name"]: entry for entry in data["sources"]}
    if source not in known:
        raise UserError(f"data.sources: no source named {source!r}; there are {', '.join(known)}")
    values = {**data, **known[source], "trust_remote_code": config.get("model", {}).get("trust_remote_code", False)}
    fields = {field.name for field in dataclasses.fields(TokeniseOptions)}
    chosen = {key: value for key, value in values.items() if key in fields}
    chosen["chat_template"] = Path(values["chat_template"]) if values.get("chat_template") else None
    chosen["end_tokens"] = tuple(values.get("end_tokens", ()))
    return [Path(file) for file in known[source]["files"]], TokeniseOptions(**chosen)
