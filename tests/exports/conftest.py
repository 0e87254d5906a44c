"""Fixtures of the tests in which published trainers read our exports.

These tests run in an environment with the trainers: `make test-exports`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from synthetic import Synthetic, capture_spec, norm_model, sample, write_manifest

from draftstates.exports.common import Options
from draftstates.exports.export import export_manifest
from draftstates.model.digest import model_digest
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.shards.dataset import ShardDataset

_OPTIONS = ("draft_vocab_size", "target_model", "target_probs_topk")
# of `norm_model`; `sample` draws its ids below it
VOCAB = 100


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return norm_model(tmp_path / "model")


@pytest.fixture
def manifest(tmp_path: Path, model_folder: Path) -> Synthetic:
    """Return a pre-norm manifest of twelve samples of 4 to 37 tokens in two shards."""
    spec = capture_spec(model_digest=model_digest(ModelFolder(model_folder)))
    samples = [sample(4 + 3 * i, spec=spec, seed=i) for i in range(12)]
    return write_manifest(tmp_path / "run", [samples[:7], samples[7:]], spec=spec)


@pytest.fixture
def exported(tmp_path: Path, manifest: Synthetic, model_folder: Path) -> Callable[..., Path]:
    def export(name: str, **more: object) -> Path:
        options = Options(**{key: more.pop(key) for key in _OPTIONS if key in more})
        output = tmp_path / name
        export_manifest(
            manifest.path, output, name=name, model_folder=model_folder, options=options, **more
        )
        return output

    return export


@pytest.fixture
def ours(manifest: Synthetic, model_folder: Path) -> Callable[..., ShardDataset]:
    return lambda name, **more: ShardDataset(
        manifest.path, trainer=name, norm=FinalNorm.from_model(ModelFolder(model_folder)), **more
    )


def assert_same(found: dict, expected: dict) -> None:
    """Compare every element of every tensor, and the types."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name
