"""Names and kinds of known families are followed; any other is refused with the reason."""

from pathlib import Path

import pytest

from draftstates.errors import UserError
from draftstates.model import family

ORIGIN = Path("m/config.json")


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (family.HEAD_NAMES, "lm_head.weight"),
        (family.HEAD_NAMES, "language_model.lm_head.weight"),
        (family.EMBEDDING_NAMES, "model.embed_tokens.weight"),
        (family.EMBEDDING_NAMES, "model.language_model.embed_tokens.weight"),
        (family.FINAL_NORM_NAMES, "model.norm.weight"),
        (family.FINAL_NORM_NAMES, "model.language_model.norm.weight"),
        (family.FINAL_NORM_NAMES, "language_model.model.norm.weight"),
    ],
)
def test_tensors_of_plain_and_wrapped_models_are_known(names: object, name: str) -> None:
    assert names.fullmatch(name)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (family.HEAD_NAMES, "lm_head.weight_scale"),
        (family.EMBEDDING_NAMES, "model.layers.61.embed_tokens.weight"),
        (family.FINAL_NORM_NAMES, "model.layers.0.norm.weight"),
        (family.FINAL_NORM_NAMES, "vision_tower.model.norm.weight"),
    ],
)
def test_tensors_of_other_parts_are_not_taken_for_them(names: object, name: str) -> None:
    assert not names.fullmatch(name)


def test_a_norm_that_is_not_known_to_be_plain_is_refused() -> None:
    family.check_plain_norm({"model_type": "llama", "rms_norm_eps": 1e-5}, origin=ORIGIN)
    with pytest.raises(UserError, match=r"m/config.json: the final norm of model_type 'gemma3'"):
        family.check_plain_norm({"model_type": "gemma3", "rms_norm_eps": 1e-5}, origin=ORIGIN)
    with pytest.raises(UserError, match=r"m/config.json: expected rms_norm_eps"):
        family.check_plain_norm({"model_type": "llama"}, origin=ORIGIN)


@pytest.mark.parametrize("scale", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_scaled_logits_are_refused_and_a_scale_of_one_is_not(scale: str) -> None:
    for plain in (None, 1, 1.0):
        family.check_plain_logits({scale: plain}, origin=ORIGIN)
    with pytest.raises(UserError, match=f"m/config.json: .* found {scale}: 0.5"):
        family.check_plain_logits({scale: 0.5}, origin=ORIGIN)
