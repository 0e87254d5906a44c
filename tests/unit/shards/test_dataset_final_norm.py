"""The final state is what the trainer reads: normed as the model norms, found where it was
captured, or refused.
"""

from pathlib import Path

import pytest
import torch
from synthetic import capture_spec, norm_model, small
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftstates.errors import UserError
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.shards.dataset import ShardDataset


def test_post_norm_is_made_from_pre_norm_as_the_model_makes_it(tmp_path: Path) -> None:
    manifest = small(tmp_path / "run")
    norm = FinalNorm.from_model(ModelFolder(norm_model(tmp_path / "model")))
    model = LlamaRMSNorm(16, eps=1e-5).to(torch.bfloat16)
    model.weight.data = norm.weight.to(torch.bfloat16)
    dataset = ShardDataset(manifest.path, final_norm="post_norm", norm=norm)
    for i in range(len(dataset)):
        stored = manifest.samples[dataset.sample_id(i)]["final_hidden_state"]
        torch.testing.assert_close(
            dataset[i]["final_hidden_state"], model(stored), rtol=2**-6, atol=0
        )
        assert not torch.allclose(dataset[i]["final_hidden_state"], stored, rtol=0.05)


def test_a_norm_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="final norm of model_type 'of-others' is not known"):
        FinalNorm.from_model(ModelFolder(norm_model(tmp_path, model_type="of-others")))


def test_pre_norm_is_not_guessed_from_post_norm(tmp_path: Path) -> None:
    manifest = small(tmp_path, spec=capture_spec(final_norm="post_norm"))
    with pytest.raises(UserError, match="cannot be undone"):
        ShardDataset(manifest.path, trainer="speculators")


def test_pre_norm_is_found_where_the_last_residual_was_captured(tmp_path: Path) -> None:
    manifest = small(tmp_path, spec=capture_spec(final_norm="post_norm", layers=(2, 5, 8)))
    dataset = ShardDataset(manifest.path, trainer="speculators")
    stored = manifest.samples[dataset.sample_id(2)]["hidden_states"]
    assert dataset.residual_layers == [2, 5]
    assert torch.equal(dataset[2]["verifier_last_hidden_states"], stored[:, 2])
    assert torch.equal(dataset[2]["hidden_states"], stored[:, :2].flatten(1))
