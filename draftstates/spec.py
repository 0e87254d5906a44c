"""The capture spec: all that decides the numbers in a shard, its key, and the sizes that follow.

The module imports torch only where a dtype is needed: the import takes seconds, and a run has
thousands of jobs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from draftstates.documents import Items, Record
from draftstates.errors import UserError

if TYPE_CHECKING:
    import torch

# version of the shard file's format
FORMAT_VERSION = 2
# torch's name of a dtype to safetensors' code and the bytes of an element
STORED_DTYPES = {
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
}
# bytes of a token: input_ids int32, loss_mask uint8
_ID_AND_MASK_BYTES = 5
# bytes of a sample: its place in `offsets`, int64
OFFSET_BYTES = 8
# bytes of a segment: its first row and its number of rows, int64
_SEGMENT_BYTES = 16
FINAL_NORMS = ("post_norm", "pre_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureSpec(Record):
    """All that decides the numbers in a shard; its `key` is the capture key.

    Attributes:
        model: name of the target model for people; it does not enter the key.
        model_digest: digest of the target model's content.
        residual_layers: ascending k of the captured r_k; empty where the final state is all.
        final_state: whether the final state of every token is captured; without it, receipts keep
            that of each sample's last token, for alignment.
        engine_args: flags of the engine that change numbers, in `engine.flags.canonical` order.
        engine_env: environment variables that change numbers, `NAME=value` each, sorted.
    """

    model: str
    model_digest: str
    compute_dtype: str
    quantization: str | None
    stored_dtype: str
    num_layers: int
    hidden_size: int
    residual_layers: Items[int]
    final_norm: str
    engine_args: Items[str] = ()
    engine_env: Items[str] = ()
    final_state: bool = True

    def __post_init__(self) -> None:
        for name in ("residual_layers", "engine_args", "engine_env"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        layers = self.residual_layers
        if list(layers) != sorted(set(layers)):
            raise UserError(f"residual_layers must be ascending and distinct, found {list(layers)}")
        if not layers and not self.final_state:
            raise UserError("residual_layers is empty and final_state false: nothing to capture")
        if layers and (layers[0] < 0 or layers[-1] > self.num_layers):
            raise UserError(
                f"residual_layers must lie in 0..{self.num_layers} for {self.model}, found"
                f" {list(layers)}"
            )
        if self.stored_dtype not in STORED_DTYPES:
            raise UserError(
                f"stored_dtype must be one of {sorted(STORED_DTYPES)}, found {self.stored_dtype!r}"
            )
        if self.final_norm not in FINAL_NORMS:
            raise UserError(
                f"final_norm must be one of {list(FINAL_NORMS)}, found {self.final_norm!r}"
            )

    @cached_property
    def key(self) -> str:
        """The capture key, 64 hex digits."""
        fields = {
            name: value for name, value in dataclasses.asdict(self).items() if name != "model"
        }
        if self.final_state:
            # so a capture with final states keeps the key that it had before there was a choice
            del fields["final_state"]
        return hashlib.sha256(
            json.dumps({**fields, "format_version": FORMAT_VERSION}, sort_keys=True).encode()
        ).hexdigest()

    def document(self) -> dict[str, Any]:
        """Return the fields and their `key`."""
        return {**dataclasses.asdict(self), "key": self.key}

    @property
    def folder_name(self) -> str:
        """Name of the capture folder below `results/`."""
        return f"{self.model}-{self.key[:8]}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's states: K layers and, where it is captured, the final state."""
        return (len(self.residual_layers) + self.final_state) * self.final_row_bytes

    @property
    def final_row_bytes(self) -> int:
        return self.hidden_size * STORED_DTYPES[self.stored_dtype][1]

    def shard_bytes(
        self, *, samples: int, tokens: int, rows: int | None = None, segments: int = 0
    ) -> int:
        """Return the bytes of a shard file without its header.

        The header takes 4 KiB and about 40 bytes a sample.

        Args:
            rows: rows of the file; None for as many as tokens.
            segments: places of the samples' rows, where samples share rows; otherwise 0.
        """
        places = (samples + 1) * OFFSET_BYTES * (2 if segments else 1)
        shared = 0 if rows is None else tokens - rows
        return (
            tokens * self.token_bytes - shared * self.row_bytes + places + segments * _SEGMENT_BYTES
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in a shard: its states, its id and its mask value."""
        return self.row_bytes + _ID_AND_MASK_BYTES

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.stored_dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a name in STORED_DTYPES."""
    import torch

    return getattr(torch, name)
