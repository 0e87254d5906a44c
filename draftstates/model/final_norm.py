"""The final norm, and the final state that a trainer asks for.

The final state is taken as stored, found among the layers, normed, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from draftstates.errors import UserError
from draftstates.model import family
from draftstates.model.folder import ModelFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalNorm:
    """A model's final RMSNorm: it turns r_N (pre-norm) into the input of `lm_head` (post-norm)."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def from_model(cls, model: ModelFolder) -> FinalNorm:
        """Read weight and epsilon.

        Raises:
            UserError: the family's norm is not known to be plain, or no weight has a known name.
        """
        family.check_plain_norm(model.text, origin=model.config_path)
        weight = model.tensor(family.FINAL_NORM_NAMES)
        if weight is None:
            raise UserError(
                f"{model.path}: expected the final norm's weight (model.norm.weight), found it in"
                " no safetensors file: put all of the model's weight files there"
            )
        return cls(weight=weight, eps=float(model.text["rms_norm_eps"]))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n, H] normed in float32, as the model does, in the rows' dtype."""
        if rows.shape[-1] != len(self.weight):
            raise UserError(
                f"expected states of {len(self.weight)} values, as the final norm's weight has,"
                f" found {rows.shape[-1]}: name the captured model's folder"
            )
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(rows.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalSource:
    """Origin of the wanted final state of a sample.

    Attributes:
        layer: position of r_N among the captured layers; None for the stored final state.
        norm: the norm to apply; None for no norm.
    """

    layer: int | None
    norm: FinalNorm | None

    def __call__(self, hidden: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """Return a sample's final state [n, H].

        Args:
            hidden: its stored layers, [n, K, H].
            final: its stored final state, [n, H].
        """
        rows = final if self.layer is None else hidden[:, self.layer]
        return rows if self.norm is None else self.norm(rows)


def find_final(
    *, capture: Mapping[str, object], wanted: str, norm: FinalNorm | None
) -> FinalSource:
    """Decide how the final state `wanted` ("pre_norm" or "post_norm") is taken from this capture.

    Args:
        capture: the manifest's `capture`, with `final_norm`, `residual_layers` and `num_layers`.
        wanted: the final state that the trainer reads.
        norm: the model's final norm, needed to make post_norm from pre_norm.

    Raises:
        UserError: the capture does not allow it: a norm cannot be undone, and a missing norm is not
            guessed.
    """
    stored = capture["final_norm"]
    if wanted not in ("pre_norm", "post_norm"):
        raise UserError(f"final_norm must be 'pre_norm' or 'post_norm', found {wanted!r}")
    if stored == wanted:
        return FinalSource(layer=None, norm=None)
    if wanted == "post_norm":
        if norm is None:
            raise UserError(
                "post_norm is asked for and the capture holds pre_norm: give the model's folder,"
                " for its final norm"
            )
        return FinalSource(layer=None, norm=norm)
    layers = list(capture["residual_layers"])  # type: ignore[call-overload]
    if capture["num_layers"] in layers:
        return FinalSource(layer=layers.index(capture["num_layers"]), norm=None)
    raise UserError(
        "pre_norm is asked for and the capture holds post_norm, which cannot be undone: capture"
        f" with final_norm: pre_norm, or add r_{capture['num_layers']} to residual_layers (found"
        f" {layers})"
    )
