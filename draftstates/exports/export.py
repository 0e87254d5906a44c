"""Export a manifest for a trainer: open it as that trainer asks, write, read back, and give the folder its name."""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path

from draftstates import model
from draftstates.dataset import ShardDataset, read_manifest
from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, identity
from draftstates.exports.trainers import TRAINERS, trainer
from draftstates.final_norm import FinalNorm
from draftstates.vocab import model_vocab_size

EXPORTED = tuple(sorted(set(TRAINERS) - {"draftstates"}))


def export_manifest(
    manifest: Path,
    output: Path,
    *,
    name: str,
    residual_layers: Sequence[int] | None = None,
    final_norm: str | None = None,
    model_folder: Path | None = None,
    split: str | None = None,
    validation_fraction: float = 0.05,
    options: Options | None = None,
) -> dict:
    """Write the samples of a manifest to `output` in the format of trainer `name`; returns what `export.json` says.

    Args:
        residual_layers: the r_k to export (our numbers); None takes all but r_N.
        final_norm: None takes what the trainer reads.
        model_folder: the captured model's, for its final norm and the size of its vocabulary; its content is compared with the capture's.

    Raises:
        UserError: the capture does not allow what is asked for, or a file cannot be written or reads back as something else.
    """
    options = options or Options()
    capture = read_manifest(manifest)["capture"]
    norm = None
    if model_folder is not None:
        _check_model(model_folder, capture)
        if options.target_vocab_size is None:
            options = dataclasses.replace(options, target_vocab_size=model_vocab_size(model_folder))
        if capture["final_norm"] == "pre_norm" and (final_norm or trainer(name).final_norm) == "post_norm":
            norm = FinalNorm.from_model(model_folder)
    if options.draft_vocab_size is not None and options.target_vocab_size is None:
        raise UserError("a draft vocabulary needs the size of the model's: give the model's folder or target_vocab_size")
    dataset = ShardDataset(
        manifest,
        names=name,
        residual_layers=residual_layers,
        final_norm=final_norm,
        norm=norm,
        split=split,
        validation_fraction=validation_fraction,
        verify=True,
    )
    if not len(dataset):
        raise UserError(f"{manifest}: no samples to export" + (f" in split {split}" if split else ""))
    write = importlib.import_module(f"draftstates.exports.{name}").export
    with Builder(output, identity=identity(dataset, options, norm)) as builder:
        summary = write(dataset, builder, options)
        builder.finish({**summary, "split": split})
    return {**summary, "files_written": builder.written, "files_reused": builder.reused}


def _check_model(folder: Path, capture: dict) -> None:
    expected = capture.get("model_digest")
    found = model.digest(folder)
    if expected is not None and found != expected:
        raise UserError(f"{folder}: not the captured model: expected content {expected[:16]}, found {found[:16]}")
