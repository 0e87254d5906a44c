"""The head: it turns a final state into logits, scaled and capped as the model does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from draftstates.errors import UserError
from draftstates.model import family
from draftstates.model.family import LogitForm
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of the head that are widened to float32 at once.
_BLOCK = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The head: norm, if one is needed, and weight.

    Attributes:
        weight: [V, H] in the dtype on the disk.
        norm: the final norm; None if the final state is already normed.
        form: what the model makes of the product with the weight.
    """

    weight: torch.Tensor
    norm: FinalNorm | None
    form: LogitForm = LogitForm()

    def inputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return the factor of the weight, float32 [n, H], from final states [n, H]."""
        return states.float() if self.norm is None else self.norm(states.float())

    def logits(self, inputs: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Return float32 [n, V], from `inputs` and the weight as a server holds it in `dtype`."""
        logits = torch.empty(len(inputs), len(self.weight))
        for rows, weight in self.blocks(dtype):
            logits[:, rows] = self.form(inputs @ weight.T)
        return logits

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the weight a block of rows at a time: rounded to `dtype`, widened to float32."""
        for first in range(0, len(self.weight), _BLOCK):
            rows = slice(first, first + _BLOCK)
            yield rows, self.weight[rows].to(dtype).float()


def read_head(model: ModelFolder, *, final_norm: str) -> Head:
    """Read the head of a captured final state: the weight and, for `pre_norm`, the norm.

    The weight is `lm_head`, or the embeddings that it is tied to.

    Raises:
        UserError: the head is quantised or missing, or the norm is of an unknown kind.
    """
    weight = model.tensor(family.HEAD_NAMES)
    tied = model.text.get("tie_word_embeddings", model.config.get("tie_word_embeddings", True))
    if weight is None and tied:
        weight = model.tensor(family.EMBEDDING_NAMES)
    if weight is None:
        raise UserError(
            f"{model.path}: expected lm_head.weight, found no safetensors file that holds it, and"
            f" {model.config_path.name} does not tie it to the embeddings: put all of the model's"
            " weight files there"
        )
    if weight.dtype not in _PLAIN_DTYPES or weight.ndim != 2:
        raise UserError(
            f"{model.path}: alignment cannot be checked: expected lm_head as a matrix in float32,"
            f" bfloat16 or float16, found {weight.dtype}, shape {tuple(weight.shape)}: use a"
            " checkpoint whose head is not quantised"
        )
    return Head(
        weight=weight[: model.vocab_size],
        norm=FinalNorm.from_model(model) if final_norm == "pre_norm" else None,
        form=family.logits(model.text),
    )
