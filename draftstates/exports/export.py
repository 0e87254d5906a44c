"""Export of a manifest for a trainer: select the states, write, read back, name the folder."""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, identity
from draftstates.model.digest import check_content
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.records import Manifest
from draftstates.shards.dataset import ShardDataset
from draftstates.shards.trainers import TRAINERS, find_trainer

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
    """Write a manifest's samples for the trainer `name`, and return the content of `export.json`.

    Args:
        residual_layers: the r_k to export, by their k; None takes all but r_N.
        final_norm: the final state to export; None takes the one that the trainer reads.
        model_folder: folder of the target model, for its final norm and the size of its vocabulary;
            its content is compared with the capture's.

    Raises:
        UserError: the capture does not allow the export, or a file cannot be written or differs
            when it is read back.
    """
    options = options or Options()
    capture = Manifest.read(manifest).capture
    norm = None
    if model_folder is not None:
        model = ModelFolder(model_folder)
        check_content(model, expected=capture.model_digest)
        options = dataclasses.replace(options, model=model)
        if options.target_vocab_size is None:
            options = dataclasses.replace(options, target_vocab_size=model.vocab_size)
        stored = capture.final_norm if capture.final_state else "pre_norm"
        if stored == "pre_norm" and (final_norm or find_trainer(name).final_norm) == "post_norm":
            norm = FinalNorm.from_model(model)
    if options.draft_vocab_size is not None and options.target_vocab_size is None:
        raise UserError(
            "a draft vocabulary needs the size of the model's: give the model's folder or"
            " target_vocab_size"
        )
    dataset = ShardDataset(
        manifest,
        trainer=name,
        residual_layers=residual_layers,
        final_norm=final_norm,
        norm=norm,
        split=split,
        validation_fraction=validation_fraction,
        verify=True,
    )
    if not len(dataset):
        raise UserError(
            f"{manifest}: no samples to export" + (f" in split {split}" if split else "")
        )
    write = importlib.import_module(f"draftstates.exports.{name}").export
    with Builder(output, identity=identity(dataset, options, norm)) as builder:
        summary = write(dataset, builder, options)
        builder.finish({**summary, "split": split})
    return {**summary, "files_written": builder.written, "files_reused": builder.reused}
