"""The final state that a trainer asks for, from the one that was captured: taken, found, normed, or refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from draftstates.errors import UserError

# Model families whose final norm is a plain RMSNorm: weight * x / rms(x). Others (Gemma adds 1 to the weight) are refused.
PLAIN_RMS_NORM = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss")
)
_WEIGHT_NAMES = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalNorm:
    """A model's final RMSNorm: turns r_N (pre-norm) into what `lm_head` reads (post-norm)."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def from_model(cls, folder: Path) -> "FinalNorm":
        """Read weight and epsilon from a Hugging Face model folder (config.json and safetensors).

        Raises:
            UserError: no such folder or files, a family whose norm is not known to be plain, or no weight under a known name.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: expected a model folder with config.json, found {type(error).__name__}: {error}") from error
        text = config.get("text_config", config)
        if text.get("model_type") not in PLAIN_RMS_NORM or "rms_norm_eps" not in text:
            raise UserError(
                f"{folder}: the final norm of model_type {text.get('model_type')!r} is not known; "
                "capture the final state as the trainer wants it"
            )
        return cls(weight=_find_weight(folder), eps=float(text["rms_norm_eps"]))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Norm rows [n, H] in float32, as the model does; the result has the rows' dtype."""
        if rows.shape[-1] != len(self.weight):
            raise UserError(f"the norm's weight has {len(self.weight)} values, the states {rows.shape[-1]}")
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(rows.dtype)


def _find_weight(folder: Path) -> torch.Tensor:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in _WEIGHT_NAMES:
                if name in names:
                    return file.get_tensor(name)
    raise UserError(f"{folder}: no safetensors file holds the final norm's weight under any of {list(_WEIGHT_NAMES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalSource:
    """Where the wanted final state of a sample comes from."""

    layer: int | None  # position of r_N among the captured layers, or None: the stored final state
    norm: FinalNorm | None  # to be applied, or None: as it is

    def __call__(self, hidden: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """The final state [n, H] of a sample, from its stored `hidden` [n, K, H] and `final` [n, H]."""
        rows = final if self.layer is None else hidden[:, self.layer]
        return rows if self.norm is None else self.norm(rows)


def find_final(*, capture: Mapping[str, object], wanted: str, norm: FinalNorm | None) -> FinalSource:
    """Decide how the final state `wanted` ("pre_norm" or "post_norm") comes from this capture.

    Args:
        capture: the manifest's `capture`; `final_norm`, `residual_layers` and `num_layers` are read.
        norm: the model's final norm, needed to make post-norm from pre-norm.

    Raises:
        UserError: the capture does not allow it. A norm cannot be undone, and no norm is guessed.
    """
    stored = capture["final_norm"]
    if wanted not in ("pre_norm", "post_norm"):
        raise UserError(f"final_norm must be 'pre_norm' or 'post_norm', found {wanted!r}")
    if stored == wanted:
        return FinalSource(layer=None, norm=None)
    if wanted == "post_norm":
        if norm is None:
            raise UserError(
                "post_norm is asked for and the capture holds pre_norm: give the model's folder, so that its norm's weight can be applied"
            )
        return FinalSource(layer=None, norm=norm)
    layers = list(capture["residual_layers"])  # type: ignore[call-overload]
    if capture["num_layers"] in layers:
        return FinalSource(layer=layers.index(capture["num_layers"]), norm=None)
    raise UserError(
        f"pre_norm is asked for and the capture holds post_norm, which cannot be undone: capture with final_norm: pre_norm, "
        f"or add r_{capture['num_layers']} to residual_layers (found {layers})"
    )
