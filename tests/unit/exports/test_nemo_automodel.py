"""NeMo Automodel's cache holds the shifted tokens, the states, and the target's probabilities."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from synthetic import Synthetic, capture_spec, norm_model, sample, small, write_manifest

from draftstates.errors import UserError
from draftstates.exports import nemo_automodel
from draftstates.exports.common import Options
from draftstates.exports.export import export_manifest
from draftstates.model.digest import model_digest
from draftstates.model.folder import ModelFolder
from draftstates.shards.dataset import ShardDataset

LONGEST = 23


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return norm_model(tmp_path / "model")


@pytest.fixture
def manifest(tmp_path: Path, model: Path) -> Synthetic:
    """Return a post-norm manifest of seven samples of 5 to 23 tokens."""
    digest = model_digest(ModelFolder(model))
    return small(tmp_path, spec=capture_spec(final_norm="post_norm", model_digest=digest))


def export(manifest: Synthetic, model: Path, **options: object) -> dict[str, torch.Tensor]:
    """Export all samples, and return the first file."""
    output = manifest.path.parent / "cache"
    export_manifest(
        manifest.path,
        output,
        name="nemo_automodel",
        model_folder=model,
        options=Options(**options),
    )
    return load_file(output / "shard-000000.safetensors")


def distribution(final: torch.Tensor, head: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    return (final.float() @ head.T)[:, selected].softmax(-1)


@pytest.mark.parametrize("length", [None, 40])
def test_row_t_holds_the_next_token_and_the_probabilities_behind_it(
    manifest: Synthetic, model: Path, length: int | None
) -> None:
    found = export(manifest, model, draft_vocab_size=20, seq_length=length)
    about = json.loads((manifest.path.parent / "cache" / "manifest.json").read_text())
    selected = torch.tensor(about["selected_token_ids"])
    head = load_file(model / "model.safetensors")["lm_head.weight"]
    dataset = ShardDataset(manifest.path)
    assert found["input_ids"].shape == (7, length or LONGEST)
    for i in range(7):
        values = manifest.samples[dataset.sample_id(i)]
        n = len(values["input_ids"])
        row = {name: tensor[i] for name, tensor in found.items()}
        assert torch.equal(row["input_ids"][: n - 1], values["input_ids"][1:].long())
        assert torch.equal(row["loss_mask"][: n - 1], values["loss_mask"][1:].long())
        assert not row["input_ids"][n - 1 :].any() and not row["loss_mask"][n - 1 :].any()
        assert row["attention_mask"].tolist() == [1] * n + [0] * (len(row["input_ids"]) - n)
        assert torch.equal(row["aux_hidden_states"][:n], values["hidden_states"].flatten(1))
        assert not row["aux_hidden_states"][n:].any()
        final = values["final_hidden_state"][1:]
        expected = distribution(final, head, selected).bfloat16()
        assert torch.equal(row["target_probs"][: n - 1], expected)
        assert (row["target_probs"][n - 1 :] == 1 / 20).all()
        best = (final.float() @ head.T).argmax(-1)
        learnt = values["loss_mask"][1:].bool() & torch.isin(best, selected)
        assert torch.equal(row["position_mask"][: n - 1, 0], learnt)
        assert not row["position_mask"][n - 1 :].any()
    assert found["position_mask"].any()


def test_the_largest_probabilities_sum_to_one(manifest: Synthetic, model: Path) -> None:
    whole = export(manifest, model, draft_vocab_size=20, dtype=torch.float32)["target_probs"]
    found = export(manifest, model, draft_vocab_size=20, dtype=torch.float32, target_probs_topk=4)
    assert "target_probs" not in found
    best = whole.topk(4, dim=-1)
    values = found["target_probs_values"]
    torch.testing.assert_close(values, best.values / best.values.sum(-1, keepdim=True))
    torch.testing.assert_close(values.sum(-1), torch.ones(values.shape[:2]))
    indices = found["target_probs_indices"]
    assert indices.dtype == torch.int32
    torch.testing.assert_close(whole.gather(-1, indices.long()), best.values)


def test_the_manifest_and_the_embeddings_are_those_that_the_trainer_compares(
    manifest: Synthetic, model: Path
) -> None:
    export(manifest, model, target_model="org/tiny", target_probs_topk=100)
    folder = manifest.path.parent / "cache"
    about = json.loads((folder / "manifest.json").read_text())
    assert about["aux_hidden_dim"] == 48 and about["aux_layer_ids"] == [1, 2, 4]
    assert (about["target_vocab_size"], about["draft_vocab_size"]) == (100, 100)
    # as many as the vocabulary has are all of them
    assert about["target_probs_topk"] == 0 and about["format_version"] == 2
    assert about["target_model"] == "org/tiny" and about["dtype"] == "bf16"
    weight = load_file(folder / "target_embeddings.safetensors")["weight"]
    expected = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weight, expected)


def test_files_hold_a_fixed_number_of_samples_and_the_last_one_the_rest(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo_automodel, "_PER_SHARD", 3)
    digest = model_digest(ModelFolder(model))
    spec = capture_spec(final_norm="post_norm", model_digest=digest)
    samples = [sample(5 + i, spec=spec, seed=i) for i in range(8)]
    manifest = write_manifest(tmp_path, [samples[:4], samples[4:]], spec=spec)
    export(manifest, model)
    files = sorted((tmp_path / "cache").glob("shard-*.safetensors"))
    found = [load_file(file)["input_ids"] for file in files]
    assert [len(each) for each in found] == [3, 3, 2]
    assert [int(row[0]) for each in found for row in each] == [
        int(each["input_ids"][1]) for each in samples
    ]


def test_what_the_cache_cannot_hold_is_refused(
    tmp_path: Path, manifest: Synthetic, model: Path
) -> None:
    with pytest.raises(UserError, match=r"^seq_length: expected at least 23, .*, found 22"):
        export(manifest, model, seq_length=22)
    with pytest.raises(UserError, match="needs the captured model's folder"):
        export_manifest(manifest.path, tmp_path / "cache", name="nemo_automodel")
    assert not (tmp_path / "cache").exists()
