"""What SGLang does to the logits of the loaded model, held against what alignment will compute."""

import torch

from draftstates.model.family import LogitForm


def check(model: torch.nn.Module, expected: LogitForm) -> None:
    """Refuse a model whose logits are scaled or capped in another way than its `config.json` says.

    Args:
        model: the loaded model.
        expected: `family.logits` of the model's configuration.

    Raises:
        SystemExit: names both forms.
    """
    for module in model.modules():
        if not hasattr(module, "logit_scale") or not hasattr(module, "final_logit_softcapping"):
            continue
        scale = module.logit_scale
        found = LogitForm(
            scale=1.0 if scale is None else float(scale),
            cap=float(module.final_logit_softcapping or 0) or None,
        )
        if abs(found.scale - expected.scale) > 1e-6 * abs(expected.scale) or (
            found.cap != expected.cap
        ):
            raise SystemExit(
                f"draftstates: alignment would compute the logits as {expected}, but SGLang"
                f" computes them as {found}: this model's configuration is not understood"
            )
