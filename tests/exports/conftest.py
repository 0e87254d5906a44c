"""Trainers as published read what we export. These tests run in an environment that holds them: `make test-exports`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from synthetic import Synthetic, capture_spec, norm_model, sample, write_manifest

from draftstates import model
from draftstates.dataset import ShardDataset
from draftstates.exports.common import Options
from draftstates.exports.export import export_manifest
from draftstates.final_norm import FinalNorm

VOCAB = 100  # of `norm_model`; `sample` draws its ids below it


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return norm_model(tmp_path / "model")


@pytest.fixture
def manifest(tmp_path: Path, model_folder: Path) -> Synthetic:
    """Twelve samples of 4 to 37 tokens in two shards, pre-norm."""
    spec = capture_spec(model_digest=model.digest(model_folder))
    samples = [sample(4 + 3 * i, spec=spec, seed=i) for i in range(12)]
    return write_manifest(tmp_path / "run", [samples[:7], samples[7:]], spec=spec)


@pytest.fixture
def exported(tmp_path: Path, manifest: Synthetic, model_folder: Path) -> Callable[..., Path]:
    def export(name: str, **more: object) -> Path:
        options = Options(**{key: more.pop(key) for key in ("draft_vocab_size", "target_model") if key in more})
        output = tmp_path / name
        export_manifest(manifest.path, output, name=name, model_folder=model_folder, options=options, **more)
        return output

    return export


@pytest.fixture
def ours(manifest: Synthetic, model_folder: Path) -> Callable[..., ShardDataset]:
    return lambda name, **more: ShardDataset(manifest.path, names=name, norm=FinalNorm.from_model(model_folder), **more)


def assert_same(found: dict, expected: dict) -> None:
    """Every element of every tensor, and its type."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name
