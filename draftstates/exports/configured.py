"""The test of the configured exports against the capture, before anything is captured."""

from draftstates.config import Configuration, Export
from draftstates.errors import UserError
from draftstates.exports.vocabulary import check_draft_size
from draftstates.model.folder import ModelFolder
from draftstates.spec import CaptureSpec


def check_exports(config: Configuration, *, spec: CaptureSpec) -> None:
    """Compare a configuration's `exports` and `draft_vocab_size` with its capture and its model.

    Raises:
        UserError: a vocabulary larger than the model's; a layer that is not captured or that the
            trainer has no number for; no layer or no final state where the trainer needs them; a
            number format that the trainer does not read; or a norm that the capture does not allow.
    """
    model = ModelFolder(config.model.path)
    if config.draft_vocab_size is not None:
        check_draft_size(config.draft_vocab_size, target_size=model.vocab_size)
    for name, chosen in config.exports.items():
        try:
            _check(name, chosen, spec, model)
        except UserError as error:
            raise UserError(f"exports.{name}: {error}") from None


def _check(name: str, chosen: Export, spec: CaptureSpec, model: ModelFolder) -> None:
    """Compare one export with the capture."""
    # These imports load torch, which takes seconds.
    from draftstates.model.final_norm import FinalNorm, find_final
    from draftstates.shards.trainers import find_trainer

    for key in ("seq_length", "target_probs_topk"):
        if getattr(chosen, key) is not None and name != "nemo_automodel":
            raise UserError(f"{key}: for nemo_automodel alone: leave it out")
    layers = chosen.residual_layers or [k for k in spec.residual_layers if k != spec.num_layers]
    if list(layers) != sorted(set(layers) & set(spec.residual_layers)):
        raise UserError(
            f"residual_layers: expected ascending k out of {list(spec.residual_layers)}, as"
            f" captured, found {layers}"
        )
    find_trainer(name).layer_numbers(layers)
    find_trainer(name).check_dtype(chosen.dtype or spec.stored_dtype)
    wanted = chosen.final_norm or find_trainer(name).final_norm or spec.final_norm
    stored = spec.final_norm if spec.final_state else "pre_norm"
    norm = FinalNorm.from_model(model) if (stored, wanted) == ("pre_norm", "post_norm") else None
    find_final(capture=spec.document(), wanted=wanted, norm=norm)
