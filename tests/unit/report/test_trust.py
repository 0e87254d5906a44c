"""Results of the checks for people: each margin and each refused sample is there."""

import dataclasses
import json
from pathlib import Path

import pytest
from results_tree import make_results

from draftstates.paths import Results
from draftstates.records import Plan, Verified
from draftstates.report.facts import (
    ALIGNMENT,
    PREFIX,
    checks_of,
    margins_of,
    named_samples,
    origins_of,
    worst_of,
)
from draftstates.report.trust import trust


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_results(tmp_path)


def test_every_verified_shard_has_its_margins(plan: Plan, tmp_path: Path) -> None:
    found = trust(Results(tmp_path), plan)
    capture = Results(tmp_path).capture(plan.capture_folder)
    assert found["missing"] == 0 and found["refused"] == []
    margins = margins_of(plan, found)
    for shard in plan.shards:
        figures = Verified.read(capture.verified(shard.shard_id)).figures
        shares = {row["check"]: row["share"] for row in margins if row["shard"] == shard.shard_id}
        assert shares[ALIGNMENT] == figures.alignment_share_of_limit > 0
        # two values that round apart to bfloat16, and the limit of bfloat16
        assert shares[PREFIX] == pytest.approx(figures.prefix_distance / 0.1)
    worst = worst_of(plan, found)
    aligned = [row for row in worst if row["check"] == ALIGNMENT]
    assert aligned[0]["share"] == max(row["share"] for row in margins if row["check"] == ALIGNMENT)
    assert len(aligned) == 5
    assert {row["sample_id"] for row in worst} <= set(named_samples(plan, found))


def test_a_refused_sample_is_named_with_its_finding(plan: Plan, tmp_path: Path) -> None:
    results = Results(tmp_path)
    capture, shard_id = results.capture(plan.capture_folder), plan.shards[0].shard_id
    capture.verified(shard_id).unlink()
    log = results.log(plan.capture_folder, "verify", shard_id)
    log.parent.mkdir(parents=True)
    log.write_text(
        f"error: x.safetensors: 2 faults in 1 sample:\n  sample {'a' * 32}: values: row 3 of r_2 is"
        f" all zero\n  the shard: counts: samples: expected 3, found 2\nTo capture it again\n"
    )
    found = trust(results, plan)
    assert (found["missing"], len(found["shards"])) == (1, len(plan.shards) - 1)
    assert [(row["sample_id"], row["check"], row["detail"]) for row in found["refused"]] == [
        ("a" * 32, "values", "row 3 of r_2 is all zero"),
        (None, "counts", "samples: expected 3, found 2"),
    ]
    reason, refused = named_samples(plan, found)["a" * 32]
    assert refused and "row 3 of r_2 is all zero" in reason


def test_findings_of_an_earlier_attempt_are_not_shown_once_the_shard_has_passed(
    plan: Plan, tmp_path: Path
) -> None:
    results, shard_id = Results(tmp_path), plan.shards[0].shard_id
    log = results.log(plan.capture_folder, "verify", shard_id)
    log.parent.mkdir(parents=True)
    log.write_text(f"  sample {'a' * 32}: values: row 3 of r_2 is all zero\n")
    assert trust(results, plan)["refused"] == []


def test_a_changed_result_of_verification_counts_as_missing(plan: Plan, tmp_path: Path) -> None:
    path = Results(tmp_path).capture(plan.capture_folder).verified(plan.shards[1].shard_id)
    path.write_text(path.read_text().replace('"recaptures": 3', '"recaptures": 4'))
    assert trust(Results(tmp_path), plan)["missing"] == 1


def test_parity_is_that_of_the_manifest_or_of_the_server(plan: Plan, tmp_path: Path) -> None:
    results = Results(tmp_path)
    capture = results.capture(plan.capture_folder)
    found = trust(results, plan)
    assert found["parity"]["layers"][0]["median"] == 1e-3
    (row,) = [row for row in checks_of(plan, found) if row["name"] == "Parity"]
    assert row["value"] == "all 8 layers"
    manifest = json.loads(capture.manifest.read_text())
    capture.manifest.chmod(0o644)
    capture.manifest.write_text(json.dumps({**manifest, "parity": None}))
    assert trust(results, plan)["parity"] == {}
    attestation = json.loads(capture.server.read_text())
    capture.server.write_text(json.dumps({**attestation, "parity": {"result": "first 2 layers"}}))
    assert trust(results, plan)["parity"]["result"] == "first 2 layers"


def test_shared_rows_are_counted_once_and_the_counts_say_so(plan: Plan, tmp_path: Path) -> None:
    found = trust(Results(tmp_path), plan)
    tokens = sum(shard.tokens for shard in plan.shards)
    for shared in (0, 7):
        shards = [dataclasses.replace(shard, shared_tokens=shared) for shard in plan.shards]
        sharing = dataclasses.replace(plan, shards=tuple(shards))
        rows = {row["name"]: row for row in checks_of(sharing, found)}
        states = (tokens - len(shards) * shared) * 4
        assert rows["Values"]["value"] == f"{states:,} rows"
        said = rows["Counts"]["meaning"]
        assert ("nothing came from a cache" in said) == (not shared)
        assert ("rows written + rows shared = tokens sent" in said) == bool(shared)


def test_versions_flags_and_images_have_their_meaning(plan: Plan, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in origins_of(plan, trust(Results(tmp_path), plan))}
    assert rows["Engine"]["value"] == "sglang 0.5.23"
    assert rows["Capture key"]["value"] == plan.capture.key
    assert rows["tp_size"]["value"] == "1" and "GPUs" in rows["tp_size"]["meaning"]
    settings = rows["Settings: flags"]["value"]
    assert settings.startswith("flag00 0, flag01 1, ")
    assert settings.endswith("flag39 39, and 10 more in server.json")
    assert rows["Container images"]["value"] == "none"


def test_norms_of_all_shards_are_those_of_their_rows(plan: Plan, tmp_path: Path) -> None:
    norms = trust(Results(tmp_path), plan)["norms"]
    assert [layer["layer"] for layer in norms["layers"]] == ["r_2", "r_4", "r_5", "final"]
    assert norms["rows"] == sum(layer["rows"] for layer in norms["layers"])
    # random normal rows of 64 numbers
    for layer in norms["layers"][:3]:
        assert 6 < layer["low"] <= layer["median"] <= layer["high"] < 11
        assert layer["mean"] == pytest.approx(8, rel=0.05)
        assert layer["median"] == pytest.approx(8, rel=0.05)
    samples = sum(shard.samples for shard in plan.shards)
    first = [row for row in norms["by_position"] if row["position"] == 0]
    assert len(first) == 4 and {row["place"] for row in first} == {0.5}
    assert norms["layers"][0]["rows"] >= samples
