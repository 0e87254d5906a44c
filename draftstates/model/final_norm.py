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
    """A model's final norm: it turns r_N (pre-norm) into the input of `lm_head` (post-norm).

    Attributes:
        weight: [H].
        bias: [H]; None for a norm without one.
        kind: its formula, as `family.NormKind` names it.
        scale: factor between the norm's output and what the head reads.
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    kind: str = family.RMS
    scale: float = 1.0

    @classmethod
    def from_model(cls, model: ModelFolder) -> FinalNorm:
        """Read formula, weight and epsilon.

        Raises:
            UserError: the family's norm is not known, or no weight has a known name.
        """
        found = family.final_norm(model.text, origin=model.config_path)
        weight, bias = model.tensor(family.FINAL_NORM_NAMES), None
        if weight is None:
            raise UserError(
                f"{model.path}: expected the final norm's weight (model.norm.weight), found it in"
                " no safetensors file: put all of the model's weight files there"
            )
        if found.kind in family.LAYER_KINDS:
            bias = model.tensor(family.FINAL_NORM_BIASES)
        return cls(
            weight=weight,
            eps=found.eps,
            bias=bias,
            kind=found.kind,
            scale=family.final_scale(model.text),
        )

    def content(self) -> bytes:
        """Return all that decides what the norm gives."""
        tensors = [self.weight] if self.bias is None else [self.weight, self.bias]
        numbers = str(self.eps)
        if (self.kind, self.scale) != (family.RMS, 1.0):
            numbers += f" {self.kind} {self.scale}"
        return b"".join(each.float().numpy().tobytes() for each in tensors) + numbers.encode()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n, H] normed in float32, as the model does, in the rows' dtype."""
        if rows.shape[-1] != len(self.weight):
            raise UserError(
                f"expected states of {len(self.weight)} values, as the final norm's weight has,"
                f" found {rows.shape[-1]}: name the captured model's folder"
            )
        wide, weight = rows.float(), self.weight.float()
        if self.kind in family.LAYER_KINDS:
            wide = wide - wide.mean(-1, keepdim=True)
        if self.kind in family.PLUS_ONE_KINDS:
            weight = weight + 1
        wide = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))
        if self.bias is not None:
            wide = wide + self.bias.float()
        return (wide * self.scale).to(rows.dtype)

    def sensitivity(self, rows: torch.Tensor) -> torch.Tensor:
        """Return by how much a relative change of each row [n, H] may grow in the norm, [n]."""
        if self.kind not in family.LAYER_KINDS:
            return torch.ones(len(rows))
        centred = rows - rows.mean(-1, keepdim=True)
        return (rows.norm(dim=-1) / centred.norm(dim=-1)).clamp(min=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalSource:
    """Origin of the wanted final state of a sample.

    Attributes:
        layer: position of r_N among the captured layers; None for the stored final state.
        norm: the norm to apply; None for no norm.
    """

    layer: int | None
    norm: FinalNorm | None

    def __call__(self, hidden: torch.Tensor, final: torch.Tensor | None) -> torch.Tensor | None:
        """Return a sample's final state [n, H].

        Args:
            hidden: its stored layers, [n, K, H].
            final: its stored final state, [n, H]; None where none is stored. Then None is returned,
                unless the final state is taken from a layer.
        """
        rows = final if self.layer is None else hidden[:, self.layer]
        return rows if self.norm is None else self.norm(rows)


def find_final(
    *, capture: Mapping[str, object], wanted: str, norm: FinalNorm | None
) -> FinalSource:
    """Decide how the final state `wanted` ("pre_norm" or "post_norm") is taken from this capture.

    Args:
        capture: the manifest's `capture`, with `final_norm`, `final_state`, `residual_layers` and
            `num_layers`.
        wanted: the final state that the trainer reads.
        norm: the model's final norm, needed to make post_norm from pre_norm.

    Raises:
        UserError: the capture does not allow it: a norm cannot be undone, a missing norm is not
            guessed, and there may be no final state.
    """
    stored = capture["final_norm"]
    layers = list(capture["residual_layers"])  # type: ignore[call-overload]
    last = layers.index(capture["num_layers"]) if capture["num_layers"] in layers else None
    if wanted not in ("pre_norm", "post_norm"):
        raise UserError(f"final_norm must be 'pre_norm' or 'post_norm', found {wanted!r}")
    held = capture.get("final_state", True)
    if not held and last is None:
        raise UserError(
            f"{wanted} is asked for and the capture holds no final states: capture with"
            f" final_state: true, or add r_{capture['num_layers']} to residual_layers (found"
            f" {layers})"
        )
    if held and stored == wanted:
        return FinalSource(layer=None, norm=None)
    if wanted == "post_norm":
        if norm is None:
            raise UserError(
                f"post_norm is asked for and the capture holds {'pre_norm' if held else 'r_N'}:"
                " give the model's folder, for its final norm"
            )
        return FinalSource(layer=None if held else last, norm=norm)
    if last is not None:
        return FinalSource(layer=last, norm=None)
    raise UserError(
        "pre_norm is asked for and the capture holds post_norm, which cannot be undone: capture"
        f" with final_norm: pre_norm, or add r_{capture['num_layers']} to residual_layers (found"
        f" {layers})"
    )
