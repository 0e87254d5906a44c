"""Each export holds what was captured, in its trainer's names, numbers and norm, or is refused."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from synthetic import (
    Synthetic,
    capture_spec,
    norm_model,
    sample,
    sharing,
    small,
    write_manifest,
)

from draftstates.commands import cli
from draftstates.errors import UserError
from draftstates.exports.common import Options, check_equal
from draftstates.exports.export import EXPORTED, export_manifest
from draftstates.model.digest import model_digest
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.shards.dataset import ShardDataset
from draftstates.shards.layout import read_header
from draftstates.spec import CaptureSpec


def post_norm(folder: Path, **more: object) -> Synthetic:
    return small(folder, spec=capture_spec(final_norm="post_norm", **more))  # type: ignore[arg-type]


def export(manifest: Synthetic, name: str, **more: object) -> Path:
    options = Options(
        **{
            key: more.pop(key)
            for key in ("dtype", "draft_vocab_size", "target_vocab_size")
            if key in more
        }
    )
    output = manifest.path.parent / name
    if name == "nemo_automodel":
        more.setdefault("model_folder", manifest.path.parent / "model")
    export_manifest(manifest.path, output, name=name, options=options, **more)  # type: ignore[arg-type]
    return output


def readable(name: str, folder: Path) -> Synthetic:
    """Write a manifest in the norm that a trainer reads, beside the folder of its model."""
    return small(folder, spec=spec_for(name, folder))


def spec_for(name: str, folder: Path) -> CaptureSpec:
    norm = "pre_norm" if name == "speculators" else "post_norm"
    digest = model_digest(ModelFolder(norm_model(folder / "model")))
    return capture_spec(final_norm=norm, model_digest=digest)


def test_speculators_files_hold_the_layers_and_then_the_pre_norm_state(tmp_path: Path) -> None:
    manifest = small(tmp_path)
    output = export(manifest, "speculators")
    left = {tuple(values["input_ids"].tolist()): values for values in manifest.samples.values()}
    for row in range(7):
        found = load_file(output / "hidden_states" / f"hs_{row}.safetensors")
        values = left.pop(tuple(found["token_ids"].tolist()))
        assert found["token_ids"].dtype == torch.int64
        assert torch.equal(found["hidden_states"][:, :3], values["hidden_states"])
        assert torch.equal(found["hidden_states"][:, 3], values["final_hidden_state"])
    assert not left


def test_specforge_files_hold_the_post_norm_state_and_the_layers_side_by_side(
    tmp_path: Path,
) -> None:
    manifest = post_norm(tmp_path)
    dataset = ShardDataset(manifest.path)
    output = export(manifest, "specforge")
    for i in range(7):
        found = torch.load(output / "rows_0-2000" / f"data_{i}.ckpt", weights_only=True)
        values = manifest.samples[dataset.sample_id(i)]
        assert torch.equal(found["hidden_state"], values["final_hidden_state"][None])
        assert torch.equal(found["aux_hidden_state"], values["hidden_states"].flatten(1)[None])
        assert torch.equal(found["input_ids"], values["input_ids"].long())
        assert torch.equal(found["loss_mask"], values["loss_mask"].long())


def test_model_optimizer_files_say_so_where_the_state_is_pre_norm(tmp_path: Path) -> None:
    manifest = small(tmp_path)
    output = export(manifest, "model_optimizer", final_norm="pre_norm")
    for name, values in manifest.samples.items():
        found = torch.load(output / f"{name}.pt", weights_only=True)
        assert found["hidden_states_prenorm"] is True and found["conversation_id"] == name
        assert torch.equal(found["hidden_states"], values["final_hidden_state"])


def test_deepspec_index_points_at_each_part(tmp_path: Path) -> None:
    manifest = post_norm(tmp_path)
    dataset = ShardDataset(manifest.path)
    output = export(manifest, "deepspec")
    index = (output / "samples.idx").read_bytes()
    assert len(index) == 7 * 56
    for i in range(7):
        number, shard, length, *offsets = struct.unpack_from("<QIIQQQQQ", index, i * 56)
        values = manifest.samples[dataset.sample_id(i)]
        assert (number, shard, length) == (i, i // 4, len(values["input_ids"]))
        data = (output / f"shard-{shard:05d}.bin").read_bytes()
        ones = torch.ones(length, dtype=torch.uint8)
        parts = [
            values["input_ids"],
            ones,
            values["loss_mask"],
            values["hidden_states"],
            values["final_hidden_state"],
        ]
        for offset, part in zip(offsets, parts, strict=True):
            expected = part.contiguous().view(torch.uint8).numpy().tobytes()
            assert data[offset : offset + len(expected)] == expected
    document = json.loads((output / "manifest.json").read_text())
    assert (document["num_samples"], document["num_shards"], document["target_layer_ids"]) == (
        7,
        2,
        [1, 2, 4],
    )


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_of_shared_rows_is_that_of_rows_of_their_own(tmp_path: Path, name: str) -> None:
    """To the last byte of every file of samples."""
    spec = spec_for(name, tmp_path)
    shared = sharing(tmp_path / "shared", spec=spec)
    apart = write_manifest(tmp_path / "apart", [list(shared.samples.values())], spec=spec)
    dataset = ShardDataset(shared.path)
    assert sum(len(dataset._locate(i)[0].pieces(i)) > 1 for i in range(len(dataset))) > 2
    found = []
    for manifest in (shared, apart):
        folder = export(manifest, name, model_folder=tmp_path / "model")
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")
        }
        named = {file for file in files if file.endswith((".json", ".jsonl"))}
        found.append({file: content for file, content in files.items() if file not in named})
    assert found[0] == found[1]
    assert len(found[0]) >= 2


@pytest.mark.parametrize("name", EXPORTED)
def test_layer_numbers_are_translated_and_stated(tmp_path: Path, name: str) -> None:
    chosen = [2, 3, 5] if name == "nemo_automodel" else [3, 5]
    output = export(readable(name, tmp_path), name, residual_layers=chosen)
    stated = json.loads((output / "export.json").read_text())
    shift = 0 if name == "speculators" else -1
    assert stated["layers"] == {f"r_{k}": k + shift for k in chosen}
    assert "r_k as k" in stated["layers_are_counted"]
    assert stated["final_norm"] == ("pre_norm" if name == "speculators" else "post_norm")
    assert (stated["samples"], stated["tokens"]) == (7, 98)


@pytest.mark.parametrize("name", sorted({*EXPORTED} - {"nemo_automodel"}))
def test_a_norm_that_the_capture_does_not_allow_is_refused(tmp_path: Path, name: str) -> None:
    manifest = post_norm(tmp_path) if name == "speculators" else small(tmp_path)
    with pytest.raises(
        UserError, match="cannot be undone" if name == "speculators" else "give the model's folder"
    ):
        export(manifest, name)
    assert not (tmp_path / name).exists()


def test_the_norm_of_another_model_is_refused(tmp_path: Path) -> None:
    right, wrong = norm_model(tmp_path / "right"), norm_model(tmp_path / "wrong")
    (wrong / "config.json").write_text(
        json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6, "vocab_size": 100})
    )
    manifest = small(tmp_path, spec=capture_spec(model_digest=model_digest(ModelFolder(right))))
    with pytest.raises(UserError, match="not the captured model"):
        export(manifest, "specforge", model_folder=wrong)
    output = export(manifest, "specforge", model_folder=right)
    dataset = ShardDataset(manifest.path)
    stored = manifest.samples[dataset.sample_id(0)]["final_hidden_state"].float()
    weight = load_file(right / "model.safetensors")["model.norm.weight"]
    expected = weight * stored / torch.sqrt(stored.square().mean(-1, keepdim=True) + 1e-5)
    found = torch.load(output / "rows_0-2000" / "data_0.ckpt", weights_only=True)["hidden_state"][0]
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=0)


def test_final_states_come_from_r_n_where_they_are_not_captured(tmp_path: Path) -> None:
    model = norm_model(tmp_path / "model")
    spec = capture_spec(
        layers=(2, 5, 8),
        final_norm="post_norm",
        final_state=False,
        model_digest=model_digest(ModelFolder(model)),
    )
    manifest = small(tmp_path / "m", spec=spec)
    values = manifest.samples[ShardDataset(manifest.path).sample_id(0)]["hidden_states"]
    output = export(manifest, "specforge", model_folder=model)
    found = torch.load(output / "rows_0-2000" / "data_0.ckpt", weights_only=True)
    assert torch.equal(found["aux_hidden_state"][0], values[:, :2].flatten(1))
    expected = FinalNorm.from_model(ModelFolder(model))(values[:, 2])
    assert torch.equal(found["hidden_state"][0], expected)
    rows = load_states(export(manifest, "speculators"))
    assert any(torch.equal(each, values) for each in rows)


def load_states(output: Path) -> list[torch.Tensor]:
    files = (output / "hidden_states").glob("*.safetensors")
    return [load_file(path)["hidden_states"] for path in files]


def test_the_final_state_alone_goes_where_no_layer_is_needed(tmp_path: Path) -> None:
    manifest = small(tmp_path, spec=capture_spec(layers=()))
    rows = load_states(export(manifest, "speculators"))
    finals = [values["final_hidden_state"][:, None] for values in manifest.samples.values()]
    assert all(any(torch.equal(row, final) for row in rows) for final in finals)
    with pytest.raises(UserError, match="specforge reads the states of at least 1"):
        export(post_norm(tmp_path / "post", layers=()), "specforge")


def test_a_model_with_the_embeddings_captured_goes_only_where_they_have_a_number(
    tmp_path: Path,
) -> None:
    manifest = post_norm(tmp_path, layers=(0, 4))
    assert json.loads((export(manifest, "deepspec") / "export.json").read_text())["layers"] == {
        "r_0": -1,
        "r_4": 3,
    }
    for name in ("specforge", "model_optimizer"):
        with pytest.raises(UserError, match="cannot name r_0"):
            export(manifest, name)


def test_deepspec_rounds_only_when_told(tmp_path: Path) -> None:
    manifest = post_norm(tmp_path, stored_dtype="float32")
    with pytest.raises(UserError, match="bfloat16 only"):
        export(manifest, "deepspec")
    export(manifest, "deepspec", dtype=torch.bfloat16)
    data = (tmp_path / "deepspec" / "shard-00000.bin").read_bytes()
    values = manifest.samples[ShardDataset(manifest.path).sample_id(0)]["hidden_states"].bfloat16()
    assert data[6 * 5 : 6 * 5 + values.numel() * 2] == values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["speculators", "specforge"])
def test_a_vocabulary_holds_the_most_learned_tokens(tmp_path: Path, name: str) -> None:
    manifest = small(tmp_path) if name == "speculators" else post_norm(tmp_path)
    output = export(manifest, name, draft_vocab_size=10, target_vocab_size=120)
    counts = np.zeros(120, dtype=int)
    for values in manifest.samples.values():
        np.add.at(counts, values["input_ids"][values["loss_mask"].bool()].numpy(), 1)
    if name == "speculators":
        d2t, t2d = (torch.from_numpy(np.load(output / f"{part}.npy")) for part in ("d2t", "t2d"))
        assert torch.load(output / "token_freq.pt", weights_only=True) == {
            i: n for i, n in enumerate(counts.tolist()) if n
        }
    else:
        d2t, t2d = torch.load(output / "vocab_mapping.pt", weights_only=True).values()
    kept = torch.arange(10) + d2t
    assert torch.equal(kept, torch.nonzero(t2d).flatten()) and len(t2d) == 120
    assert counts[kept.numpy()].min() >= np.sort(counts)[-10]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_vocab_size": 10}, "needs the size of the model's"),
        ({"draft_vocab_size": 121, "target_vocab_size": 120}, r"must lie in 1\.\.120, found 121"),
        ({"draft_vocab_size": 10, "target_vocab_size": 50}, "in a vocabulary of 50"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        export(small(tmp_path), "speculators", **options)
    assert not (tmp_path / "speculators").exists()


@pytest.mark.parametrize("name", EXPORTED)
def test_a_row_more_writes_one_sample_and_a_rerun_none(tmp_path: Path, name: str) -> None:
    spec = spec_for(name, tmp_path)
    samples = [sample(5 + i, spec=spec, seed=i) for i in range(9)]
    output = tmp_path / "out"

    def written(folder: str, contents: list) -> tuple[int, int]:
        manifest = write_manifest(tmp_path / folder, contents, spec=spec)
        summary = export_manifest(manifest.path, output, name=name, model_folder=tmp_path / "model")
        return summary["files_written"], summary["files_reused"]

    # DeepSpec's files are whole shards, NeMo Automodel's 256 samples
    whole = {"deepspec": 2, "nemo_automodel": 1}.get(name, 8)
    assert written("a", [samples[:4], samples[5:]]) == (whole, 0)
    assert written("b", [samples[:4], samples[5:]]) == (0, whole)
    together = name in ("deepspec", "nemo_automodel")
    assert written("c", [samples[:5], samples[5:]]) == (1, whole - together)
    fresh = tmp_path / "fresh"
    export_manifest(
        tmp_path / "c" / "manifest.json", fresh, name=name, model_folder=tmp_path / "model"
    )
    files = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    assert files == {path.relative_to(output) for path in output.rglob("*") if path.is_file()}
    differing = {
        path.name for path in files if (fresh / path).read_bytes() != (output / path).read_bytes()
    }
    # The ledger has times of the files; `state.json` has a fingerprint that is random.
    assert differing <= {"ledger.jsonl", "state.json"}


@pytest.mark.parametrize(
    "tensor", ["final_hidden_state", "hidden_states", "input_ids", "loss_mask"]
)
@pytest.mark.parametrize("name", EXPORTED)
def test_a_damaged_shard_is_not_exported(tmp_path: Path, name: str, tensor: str) -> None:
    manifest = readable(name, tmp_path)
    path = ShardDataset(manifest.path)._shard(1).path
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors[tensor][2]] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="does not have the checksum|other tokens or another mask"):
        export(manifest, name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    "found",
    [
        {"a": torch.tensor([1, 3]), "b": 1},
        {"a": torch.tensor([1, 2], dtype=torch.int32), "b": 1},
        {"a": torch.tensor([[1, 2]]), "b": 1},
        {"a": torch.tensor([1, 2]), "b": 2},
        {"a": torch.tensor([1, 2])},
        {"a": torch.tensor([1, 2]), "b": 1, "c": 1},
        {"a": None, "b": 1},
    ],
)
def test_reading_back_finds_every_difference(found: dict) -> None:
    expected = {"a": torch.tensor([1, 2]), "b": 1}
    check_equal(Path("x"), {"a": torch.tensor([1, 2]), "b": 1}, expected)
    with pytest.raises(UserError, match="reading back gave"):
        check_equal(Path("x"), found, expected)


def test_a_split_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no samples to export in split validation"):
        export(small(tmp_path), "speculators", split="validation", validation_fraction=1e-9)


def test_the_command_states_layers_and_norm_and_a_users_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = post_norm(tmp_path)

    def command(name: str) -> None:
        arguments = ["--manifest", manifest.path, "--output", tmp_path / "out", "--trainer", name]
        cli.main(["export", *map(str, arguments)])

    command("specforge")
    said = capsys.readouterr().err
    assert "r_2 as 1, r_3 as 2, r_5 as 4" in said and "final state: post_norm" in said
    with pytest.raises(SystemExit, match=r"^error: pre_norm is asked for"):
        command("speculators")
