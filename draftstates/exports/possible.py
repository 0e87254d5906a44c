"""Whether a capture can be exported as the configuration asks, seen before anything is captured."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstates.capture_spec import CaptureSpec
from draftstates.errors import UserError
from draftstates.vocab import check_draft_size, model_vocab_size


def check_exports(config: Mapping[str, Any], *, spec: CaptureSpec) -> None:
    """Hold a resolved configuration's `exports` and `draft_vocab_size` to its capture and its model.

    Raises:
        UserError: a vocabulary larger than the model's; a layer that is not captured or that the trainer has no number for; a number
            format that it does not read; or a norm that the capture does not allow.
    """
    model = Path(config["model"]["path"])
    if config["draft_vocab_size"] is not None:
        check_draft_size(config["draft_vocab_size"], target_size=model_vocab_size(model))
    for name, chosen in config["exports"].items():
        try:
            _check(name, chosen, spec, model)
        except UserError as error:
            raise UserError(f"exports.{name}: {error}") from None


def _check(name: str, chosen: Mapping[str, Any], spec: CaptureSpec, model: Path) -> None:
    from draftstates.exports.trainers import trainer  # torch, which takes seconds, where an export is asked for alone
    from draftstates.final_norm import FinalNorm, find_final

    layers = chosen["residual_layers"] or [k for k in spec.residual_layers if k != spec.num_layers]
    if list(layers) != sorted(set(layers) & set(spec.residual_layers)):
        raise UserError(f"residual_layers: expected ascending k out of {list(spec.residual_layers)}, as captured, found {layers}")
    trainer(name).layer_numbers(layers)
    trainer(name).check_dtype(chosen["dtype"] or spec.stored_dtype)
    wanted = chosen["final_norm"] or trainer(name).final_norm or spec.final_norm
    norm = FinalNorm.from_model(model) if (spec.final_norm, wanted) == ("pre_norm", "post_norm") else None
    find_final(capture=dataclasses.asdict(spec), wanted=wanted, norm=norm)
