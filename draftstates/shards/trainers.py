"""Conventions of each trainer: its layer numbers, its final state, and the names of its tensors.

A layer of ours is r_k, the residual stream after k decoder layers. speculators counts as we do (and
as vLLM does). SpecForge, Model-Optimizer, NeMo Automodel and DeepSpec write r_k as the number of
the layer that outputs it: k - 1.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from draftstates.errors import UserError

_ANY, _SOME, _THREE = range(10**6), range(1, 10**6), range(3, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class States:
    """One sample as a trainer needs it, before its tensors have the trainer's names.

    Attributes:
        input_ids: int32 [n].
        loss_mask: uint8 [n].
        layers: states of the layers, [n, K, H].
        final: final state, [n, H]; None where it is not captured, which our own names alone allow.
        final_norm: norm of the final state, "pre_norm" or "post_norm".
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    layers: torch.Tensor
    final: torch.Tensor | None
    final_norm: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer's conventions.

    Attributes:
        name: name of the trainer.
        final_norm: norm of the final state that it reads; None for the captured one.
        shift: number to add to k for its number of r_k.
        first_layer: least k of an r_k that it can name.
        numbering: its way to number layers, for messages.
        names: function from a sample's states to tensors with its names.
        only_dtype: number format that it reads where it reads one only.
        layer_counts: the numbers of layers that it can read; some trainers train on the final state
            alone.
    """

    name: str
    final_norm: str | None
    shift: int
    first_layer: int
    numbering: str
    names: Callable[[States], dict[str, torch.Tensor]]
    only_dtype: str | None = None
    layer_counts: range = _ANY

    def layer_numbers(self, layers: Sequence[int]) -> list[int]:
        """Return the trainer's numbers for r_k, k in `layers`.

        Raises:
            UserError: the trainer has no number for a layer, or reads another number of layers.
        """
        if len(layers) not in self.layer_counts:
            expected = "exactly 3" if self.layer_counts == _THREE else "at least 1"
            raise UserError(
                f"{self.name} reads the states of {expected} of the layers before r_N, found"
                f" {list(layers)}: name others in residual_layers"
            )
        if layers and min(layers) < self.first_layer:
            raise UserError(
                f"{self.name} cannot name r_{min(layers)}: its layers are {self.numbering}, from"
                f" r_{self.first_layer} on"
            )
        return [k + self.shift for k in layers]

    def check_dtype(self, dtype: str) -> None:
        """Refuse a number format, named as in the configuration, that the trainer cannot read.

        Raises:
            UserError: the trainer reads another number format only.
        """
        if self.only_dtype not in (None, dtype):
            only = self.only_dtype
            raise UserError(
                f"{self.name} reads {only} only, the states are {dtype}: ask for dtype {only} to"
                " round them"
            )


def _ours(states: States) -> dict[str, torch.Tensor]:
    final = {} if states.final is None else {"final_hidden_state": states.final}
    # cross_entropy takes int64 ids alone, and a mask of bool chooses rows
    return {
        "input_ids": states.input_ids.long(),
        "loss_mask": states.loss_mask.bool(),
        "hidden_states": states.layers,
        **final,
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
    # SpecForge's own loader does the same: the last token has no next token
    loss_mask[-1:] = 0
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


def _nemo_automodel(states: States) -> dict[str, torch.Tensor]:
    def shifted(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[1:], torch.zeros_like(values[:1])])

    return {
        "input_ids": shifted(states.input_ids.long()),
        "attention_mask": torch.ones_like(states.input_ids, dtype=torch.int64),
        "loss_mask": shifted(states.loss_mask.long()),
        "aux_hidden_states": states.layers.flatten(1),
        # the head makes the cache's probabilities of it
        "target_hidden_state": shifted(states.final),
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
        Trainer(
            name="draftstates",
            final_norm=None,
            shift=0,
            first_layer=0,
            numbering=_AS_ENTERED,
            names=_ours,
        ),
        Trainer(
            name="speculators",
            final_norm="pre_norm",
            shift=0,
            first_layer=0,
            numbering=_AS_ENTERED,
            names=_speculators,
        ),
        Trainer(
            name="specforge",
            final_norm="post_norm",
            shift=-1,
            first_layer=1,
            numbering=_AS_OUTPUT,
            names=_specforge,
            layer_counts=_SOME,
        ),
        Trainer(
            name="model_optimizer",
            final_norm="post_norm",
            shift=-1,
            first_layer=1,
            numbering=_AS_OUTPUT,
            names=_model_optimizer,
        ),
        Trainer(
            name="nemo_automodel",
            final_norm="post_norm",
            shift=-1,
            first_layer=1,
            numbering=_AS_OUTPUT,
            names=_nemo_automodel,
            layer_counts=_THREE,
        ),
        Trainer(
            name="deepspec",
            final_norm="post_norm",
            shift=-1,
            first_layer=0,
            numbering=_OR_EMBEDDINGS,
            names=_deepspec,
            layer_counts=_SOME,
            only_dtype="bfloat16",
        ),
    )
}


def find_trainer(name: str) -> Trainer:
    """Return the conventions of the trainer `name`.

    Raises:
        UserError: no trainer has this name.
    """
    if name not in TRAINERS:
        raise UserError(f"no trainer is called {name!r}; known are {sorted(TRAINERS)}")
    return TRAINERS[name]
