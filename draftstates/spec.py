"""What decides the numbers in a shard: the capture key, and what is counted by it.

It imports torch only where a dtype is asked for: that takes seconds, and jobs that need none start by the thousand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstates.errors import UserError

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1  # of the shard file
STORED_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}  # torch's name: safetensors' code, bytes
FINAL_NORMS = ("post_norm", "pre_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """What decides the numbers in a shard. Its `key` is the capture key; outputs live below it.

    `model` is a name for people; `model_digest` is the content (see `draftstates.model.digest`) and alone enters the key.
    """

    model: str
    model_digest: str
    compute_dtype: str
    quantization: str | None
    stored_dtype: str
    num_layers: int
    hidden_size: int
    residual_layers: tuple[int, ...]
    final_norm: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "residual_layers", tuple(self.residual_layers))
        layers = self.residual_layers
        if list(layers) != sorted(set(layers)) or not layers:
            raise UserError(f"residual_layers must be ascending and distinct, found {list(layers)}")
        if layers[0] < 0 or layers[-1] > self.num_layers:
            raise UserError(f"residual_layers must lie in 0..{self.num_layers} for {self.model}, found {list(layers)}")
        if self.stored_dtype not in STORED_DTYPES:
            raise UserError(f"stored_dtype must be one of {sorted(STORED_DTYPES)}, found {self.stored_dtype!r}")
        if self.final_norm not in FINAL_NORMS:
            raise UserError(f"final_norm must be one of {list(FINAL_NORMS)}, found {self.final_norm!r}")

    @cached_property
    def key(self) -> str:
        """The capture key, 64 hex digits."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "model"}
        return hashlib.sha256(json.dumps({**fields, "format_version": FORMAT_VERSION}, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CaptureSpec:
        """A capture as a plan holds it: its fields and their `key`.

        Raises:
            UserError, KeyError, TypeError: a field is missing, unknown or impossible.
            ValueError: the key is not that of the fields.
        """
        spec = cls(**{name: value for name, value in fields.items() if name != "key"})
        if spec.key != fields["key"]:
            raise ValueError(f"a capture changed since it was planned: its fields make key {spec.key[:16]}, found {fields['key'][:16]}")
        return spec

    @classmethod
    def from_plan(cls, plan: Path) -> CaptureSpec:
        """The capture that a plan was made for (`capture` in plan.json).

        Raises:
            UserError: no such plan, or its key is not that of its fields (it was changed, or made by another version).
        """
        try:
            return cls.from_fields(json.loads(plan.read_text())["capture"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{plan}: no capture can be read from it: {type(error).__name__}: {error}; plan again") from error

    @property
    def run_name(self) -> str:
        """Folder of this capture's outputs below `results/`."""
        return f"{self.model}-{self.key[:8]}"

    @property
    def row_bytes(self) -> int:
        """Bytes of states that one token takes: K aux layers and the final state."""
        return (len(self.residual_layers) + 1) * self.final_row_bytes

    @property
    def final_row_bytes(self) -> int:
        return self.hidden_size * STORED_DTYPES[self.stored_dtype][1]

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.stored_dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The number format that one of STORED_DTYPES names."""
    import torch

    return getattr(torch, name)
