"""The results tree: its paths, as names and as patterns, and that one module knows them."""

import re
from pathlib import Path

import pytest

from draftstates.paths import Capture, Results, recaptures_of, receipts_of

REPOSITORY = Path(__file__).parents[2]
ID, OTHER = "0" * 32, "1" * 32
# a path of the results tree built by hand
BY_HAND = re.compile(
    r"/ f?\"(shards|verified|tokens|logs|benchmarks|report|vocabulary|exports|plan\.json|\.server"
    r"|server\.json|server\.log|attestation\.json|\.containers|\.run\.lock|\.building|\.selftest"
    r"|samples\.parquet|\{[^\"]*\}\.safetensors)\""
)


def test_a_path_can_be_a_pattern_of_snakemake() -> None:
    results = Results(Path("results"))
    capture = results.capture("{capture}")
    assert str(capture.shard("{shard_id}")) == "results/{capture}/shards/{shard_id}.safetensors"
    assert str(capture.recaptures("{shard_id}")).endswith("/{shard_id}.recaptures.safetensors")
    assert str(capture.receipts("{shard_id}")).endswith("/{shard_id}.receipts.json")
    assert str(results.log("{capture}", "extract", "{shard_id}")) == (
        "results/logs/{capture}/extract/{shard_id}.log"
    )
    assert str(results.benchmark("plan")) == "results/benchmarks/plan.tsv"


def test_a_shard_leads_to_its_companions_and_its_capture_folder() -> None:
    capture = Results(Path("results")).capture("m-12345678")
    shard = capture.shard(ID)
    assert Capture.of_shard(shard) == capture
    assert recaptures_of(shard) == capture.recaptures(ID)
    assert receipts_of(shard) == capture.receipts(ID)
    assert Results.of_plan(Path("results/plan.json")) == Results(Path("results"))


def test_only_capture_folders_are_captures(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.shard_tokens_folder.mkdir(parents=True)
    for name in ("b-2", "a-1"):
        results.capture(name).shards.mkdir(parents=True)
    assert [capture.name for capture in results.captures()] == ["a-1", "b-2"]


@pytest.mark.parametrize("missing", ["shard", "recaptures", "receipts"])
def test_a_shard_is_whole_with_its_three_files(tmp_path: Path, missing: str) -> None:
    capture = Capture(tmp_path)
    capture.shards.mkdir()
    for part in (capture.shard, capture.recaptures, capture.receipts):
        part(ID).touch()
        part(OTHER).touch()
    getattr(capture, missing)(OTHER).unlink()
    assert capture.whole_shard_ids() == {ID}
    assert capture.begun_shard_ids() == {ID, OTHER}
    assert capture.shard_ids() == ({ID} if missing == "shard" else {ID, OTHER})


def test_a_capture_folder_that_is_not_there_has_no_shards(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "none")
    assert not capture.shard_ids() | capture.whole_shard_ids() | capture.verified_ids()


def test_no_other_module_builds_a_path_of_the_results_tree() -> None:
    files = [
        path
        for pattern in ("draftstates/**/*.py", "scripts/*.py", "rules/*.smk", "Snakefile")
        for path in REPOSITORY.glob(pattern)
        if path.name != "paths.py"
    ]
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if BY_HAND.search(line)
    ]
    assert len(files) > 50
    assert found == []
