"""Weights of a quantised checkpoint as plain ones, each when it is read.

Two formats are documented well enough to be a reference: FP8 in blocks (DeepSeek-V3's) and INT4
packed (compressed-tensors). transformers' own conversion is none: it misreads FP8 matrices whose
rows are no whole number of blocks.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

_FP8_PARTS = ("weight_scale_inv", "activation_scale", "input_scale")
_PACKED_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
)


class NotDequantised(Exception):
    """The reason why a checkpoint's weights cannot be made plain ones."""


class LazyTensor:
    """A tensor that is computed when it is read, as transformers reads a slice of a file."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __getitem__(self, _: object) -> torch.Tensor:
        return self._make()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint is quantised.

    Attributes:
        parts: last parts of the names of the tensors that make up one weight, besides `weight`.
        block: rows and columns of an FP8 block; None for packed integers.
        bits: bits of a packed integer; None for FP8.
    """

    parts: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    bits: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Scheme":
        """Return the scheme that a `quantization_config` names; a plain one for an empty mapping.

        Raises:
            NotDequantised: the format is another one.
        """
        if not config:
            return cls()
        method = config.get("quant_method")
        if method == "fp8":
            block = config.get("weight_block_size")
            if isinstance(block, (list, tuple)) and len(block) == 2:
                return cls(parts=_FP8_PARTS, block=(int(block[0]), int(block[1])))
            raise NotDequantised("fp8 without weight_block_size is not dequantised")
        if method == "compressed-tensors":
            return cls._packed(config)
        raise NotDequantised(f"weights of quant_method {method} are not dequantised")

    @classmethod
    def _packed(cls, config: Mapping[str, Any]) -> "Scheme":
        groups = list((config.get("config_groups") or {}).values())
        weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
        kind = (
            config.get("format", "pack-quantized"),
            weights.get("type"),
            weights.get("symmetric"),
        )
        bits = weights.get("num_bits")
        if kind != ("pack-quantized", "int", True) or bits not in (4, 8):
            raise NotDequantised(
                f"compressed-tensors of format {kind[0]}, {len(groups)} groups, type"
                f" {kind[1]}, {bits} bits, symmetric {kind[2]} are not dequantised"
            )
        if weights.get("actorder"):
            raise NotDequantised("compressed-tensors with actorder are not dequantised")
        return cls(parts=_PACKED_PARTS, bits=bits)

    def plain_name(self, key: str) -> str:
        """Return the name of the plain weight that a tensor of the checkpoint belongs to."""
        stem, _, last = key.rpartition(".")
        return f"{stem}.weight" if last in self.parts else key

    def plain(self, slices: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain weights by name, each read when it is used.

        Args:
            slices: the checkpoint's tensors by name, as slices of open files.

        Raises:
            NotDequantised: a packed weight has zero points or a permutation.
        """
        for key in slices if self.bits else ():
            if key.endswith((".weight_zero_point", ".weight_g_idx")):
                raise NotDequantised(f"{key} is not dequantised")
        found: dict[str, Any] = {}
        for key, part in slices.items():
            stem, _, last = key.rpartition(".")
            if self.block and f"{stem}.weight_scale_inv" in slices:
                if last == "weight":
                    found[key] = self._from_blocks(part, slices[f"{stem}.weight_scale_inv"])
            elif self.bits and f"{stem}.weight_packed" in slices:
                if last == "weight_packed":
                    found[f"{stem}.weight"] = self._from_packed(slices, stem)
            else:
                found[key] = part
        return found

    def _from_blocks(self, weight: Any, scale: Any) -> LazyTensor:
        return LazyTensor(lambda: from_blocks(weight[...], scale[...], self.block))

    def _from_packed(self, slices: Mapping[str, Any], stem: str) -> LazyTensor:
        packed, scale, shape = (
            slices[f"{stem}.{name}"] for name in ("weight_packed", "weight_scale", "weight_shape")
        )
        return LazyTensor(
            lambda: from_packed(packed[...], scale[...], shape[...].tolist(), self.bits)
        )


def from_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return an FP8 matrix [R, C] times its blocks' scales, float32; the last blocks may be cut."""
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float().mul_(wide.repeat_interleave(block[1], 1)[:, :columns])


def from_packed(
    packed: torch.Tensor, scale: torch.Tensor, shape: list[int], bits: int
) -> torch.Tensor:
    """Return a matrix of packed integers times its groups' scales, float32.

    Args:
        packed: int32 [R, ceil(C * bits / 32)]: numbers offset by 2^(bits-1), packed along a row,
            the lowest bits first.
        scale: [R, groups of a row].
        shape: R and C.
    """
    numbers = torch.stack(
        [(packed >> (bits * place)) & (2**bits - 1) for place in range(32 // bits)], dim=-1
    ).reshape(packed.shape[0], -1)
    plain = (numbers[:, : shape[1]] - 2 ** (bits - 1)).float()
    grouped = plain.reshape(shape[0], scale.shape[1], -1) * scale.float()[..., None]
    return grouped.reshape(shape)
