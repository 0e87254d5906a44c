"""What each trainer calls things: its layer numbers, its final state, and the names that its loader yields.

A layer of ours is r_k, the residual stream after k decoder layers. speculators counts as we do (as vLLM does); SpecForge,
Model-Optimizer and DeepSpec write the layer whose output it is: k - 1.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from draftstates.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class States:
    """One sample, decided but not yet named."""

    input_ids: torch.Tensor  # int32 [n]
    loss_mask: torch.Tensor  # uint8 [n]
    layers: torch.Tensor  # [n, K, H]
    final: torch.Tensor  # [n, H], pre- or post-norm as asked
    final_norm: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer's conventions.

    Attributes:
        first_layer: the smallest r_k that it can name.
        final_norm: None takes what was captured.
        only_dtype: the one number format that it reads, where it is so.
    """

    name: str
    final_norm: str | None
    shift: int
    first_layer: int
    counts: str
    names: Callable[[States], dict[str, torch.Tensor]]
    only_dtype: str | None = None

    def layer_numbers(self, layers: Sequence[int]) -> list[int]:
        """The trainer's numbers for r_k, k in `layers`.

        Raises:
            UserError: a layer that the trainer has no number for.
        """
        if layers and min(layers) < self.first_layer:
            raise UserError(f"{self.name} cannot name r_{min(layers)}: its layers are {self.counts}, from r_{self.first_layer} on")
        return [k + self.shift for k in layers]

    def check_dtype(self, dtype: str) -> None:
        """Raises UserError: the trainer cannot read states of this number format, named as in the configuration."""
        if self.only_dtype not in (None, dtype):
            only = self.only_dtype
            raise UserError(f"{self.name} reads {only} only, the states are {dtype}: ask for dtype {only} to round them")


def _ours(states: States) -> dict[str, torch.Tensor]:
    return {
        "input_ids": states.input_ids,
        "loss_mask": states.loss_mask,
        "hidden_states": states.layers,
        "final_hidden_state": states.final,
    }


def _speculators(states: States) -> dict[str, torch.Tensor]:
    length = len(states.input_ids)
    return {
        "hidden_states": states.layers.flatten(1),
        "input_ids": states.input_ids.long(),
        "verifier_last_hidden_states": states.final,
        "loss_mask": states.loss_mask.long(),
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


def _specforge(states: States) -> dict[str, torch.Tensor]:
    loss_mask = states.loss_mask.long()
    loss_mask[-1:] = 0  # as its own loader does: the last token has no next one
    return {
        "attention_mask": torch.ones_like(loss_mask)[None],
        "loss_mask": loss_mask[None],
        "target": states.final[None],
        "hidden_state": states.layers.flatten(1)[None],
        "input_ids": states.input_ids.long()[None],
    }


def _model_optimizer(states: States) -> dict[str, torch.Tensor]:
    ids = states.input_ids.long()
    return {
        "input_ids": ids,
        "base_model_hidden_states": states.final,
        "aux_hidden_states": states.layers.flatten(1),
        "attention_mask": torch.ones_like(ids),
        "loss_mask": states.loss_mask.long(),
        "labels": torch.cat([ids[1:], torch.tensor([-100])]),
        "base_hidden_prenorm": states.final_norm == "pre_norm",  # type: ignore[dict-item]
    }


def _deepspec(states: States) -> dict[str, torch.Tensor]:
    return {
        "input_ids": states.input_ids,
        "loss_mask": states.loss_mask,
        "target_hidden_states": states.layers.flatten(1),
        "target_last_hidden_states": states.final,
    }


_AS_ENTERED = "r_k as k, the state on entry to layer k"
_AS_OUTPUT = "r_k as k - 1, the output of layer k - 1 counted from 0"
_OR_EMBEDDINGS = _AS_OUTPUT + ", the embeddings as -1"

TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer(name="draftstates", final_norm=None, shift=0, first_layer=0, counts=_AS_ENTERED, names=_ours),
        Trainer(name="speculators", final_norm="pre_norm", shift=0, first_layer=0, counts=_AS_ENTERED, names=_speculators),
        Trainer(name="specforge", final_norm="post_norm", shift=-1, first_layer=1, counts=_AS_OUTPUT, names=_specforge),
        Trainer(name="model_optimizer", final_norm="post_norm", shift=-1, first_layer=1, counts=_AS_OUTPUT, names=_model_optimizer),
        Trainer(
            name="deepspec",
            final_norm="post_norm",
            shift=-1,
            first_layer=0,
            counts=_OR_EMBEDDINGS,
            names=_deepspec,
            only_dtype="bfloat16",
        ),
    )
}


def trainer(name: str) -> Trainer:
    """The conventions of the trainer called `name`.

    Raises:
        UserError: none is called so.
    """
    if name not in TRAINERS:
        raise UserError(f"no trainer is called {name!r}; known are {sorted(TRAINERS)}")
    return TRAINERS[name]
