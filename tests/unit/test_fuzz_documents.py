"""Documents and configurations with any one value changed: read as they are, or refused by name."""

import json
import re
from pathlib import Path

import pytest
from captured import Files, capture, parity_of, tiny_model, verify, write
from fuzz import changed, damaged
from hypothesis import given
from hypothesis import strategies as st
from synthetic import change_manifest, small

from draftstates import ShardDataset
from draftstates.config import resolve
from draftstates.documents import Document, sealed
from draftstates.errors import UserError
from draftstates.records import Manifest, Parity, Plan, ShardReceipts, Verified

CONFIGURATION = {
    "data": {
        "sources": [{"name": "a", "files": ["a.jsonl"], "weight": 0.5, "columns": {"tools": "t"}}],
        "max_tokens": 64,
        "over_long": "cut",
        "end_tokens": ["<|im_end|>"],
        "chat_template": None,
        "template_arguments": {"x": 1},
    },
    "model": {"path": "models/tiny", "name": "tiny"},
    "capture": {"residual_layers": [1, 2], "final_norm": "post_norm", "stored_dtype": "float32"},
    "shards": {"min_bytes": "1MiB", "max_bytes": "4MiB"},
    "checks": {"recapture_fraction": 0.1, "recapture_minimum": 3},
    "extract": {"tokens_per_second": 10.0, "reuse": True},
    "server": {
        "launcher": "slurm",
        "args": ["--x", "1"],
        "env": {"A": "b"},
        "slurm": {"sbatch": ["--gpus=1"], "poll_seconds": 5},
    },
    "containers": {"tools": None},
    "exports": {"speculators": {"residual_layers": [1]}},
    "exclude": ["0" * 32],
    "max_bytes": "1TB",
    "draft_vocab_size": 8,
    "results": "results",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("documents")
    return write(capture(tiny_model(folder / "model"), samples=4), folder / "shards")


@pytest.fixture(scope="module")
def documents(files: Files) -> dict[type[Document], dict]:
    manifest = small(files.shard.parent / "small").path
    return {
        Plan: files.plan.document(),
        ShardReceipts: json.loads(files.receipts.read_text()),
        Verified: verify(files).document(),
        Manifest: json.loads(manifest.read_text()),
        Parity: parity_of(files.plan.capture).document(),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place") / "document.json"


def read(kind: type[Document], place: Path) -> Document | None:
    """Read a document; return None where it is refused by its name, with what to do."""
    try:
        return kind.read(place)
    except UserError as error:
        assert str(place) in str(error)
        assert "snakemake --cores all" in str(error)
        return None


@pytest.mark.parametrize("kind", [Plan, ShardReceipts, Verified, Manifest, Parity])
@given(data=st.data())
def test_a_document_with_any_value_changed_is_read_or_refused_by_name(
    kind: type[Document], documents: dict, place: Path, data: st.DataObject
) -> None:
    """The digest is made anew, as if the writer had written it."""
    document = data.draw(changed(documents[kind]))
    document = sealed(document) if isinstance(document, dict) and kind.SEALED else document
    place.write_text(json.dumps(document))
    found = read(kind, place)
    # NaN is no JSON and not equal to itself; verification refuses it
    if found and not {"NaN", "Infinity"} & set(re.findall("NaN|Infinity", place.read_text())):
        # what is read can be written, and is the same
        found.publish(place)
        assert read(kind, place) == found


@pytest.mark.parametrize("kind", [Plan, Verified, Manifest, Parity])
@given(data=st.data())
def test_a_damaged_document_with_a_digest_is_refused_or_says_the_same(
    kind: type[Document], documents: dict, place: Path, data: st.DataObject
) -> None:
    whole = json.dumps(documents[kind]).encode()
    place.write_bytes(data.draw(damaged(whole)))
    found = read(kind, place)
    place.write_bytes(whole)
    assert found in (None, kind.read(place))


@given(data=st.data())
def test_a_manifest_that_its_writer_never_wrote_is_refused_or_gives_the_right_samples(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    made = small(folder, shard_sizes=(2, 1))
    document = data.draw(changed(json.loads(made.path.read_text())))
    made.path.write_text(json.dumps(document))
    try:
        if isinstance(document, dict):
            change_manifest(made.path)
        samples = ShardDataset(made.path, verify=True)
        for i in range(len(samples)):
            found, right = samples[i], made.samples[samples.sample_id(i)]
            assert (found["input_ids"] == right["input_ids"]).all()
    except UserError as error:
        assert str(folder) in str(error)


@given(changed(CONFIGURATION))
def test_a_configuration_with_any_value_changed_is_taken_or_refused_by_key(
    document: object,
) -> None:
    try:
        resolve(document, origin="my.yaml")
    except UserError as error:
        assert str(error)
