"""The self-test's rows of every layer: kept whole, and every later server is held to them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synthetic import capture_spec

from draftstates.capture.every_layer import keep_rows, read_kept_rows
from draftstates.errors import UserError
from draftstates.extract.protocol import PLAIN, SELF_TEST, Destination, kept_positions
from draftstates.shards.selftest_rows import Prompt, SelftestRows, read_id
from draftstates.verify.kept_rows import _publish_first, check_same

SPEC = capture_spec(stored_dtype="float32")


def rows_of(seed: int = 0) -> SelftestRows:
    draw = torch.Generator().manual_seed(seed)
    states = {f"r_{k}": torch.randn(20, 16, generator=draw) for k in range(4)}
    prompt = Prompt(
        input_ids=torch.arange(20, dtype=torch.int32), positions=torch.arange(20), states=states
    )
    return SelftestRows(id=f"id {seed}", capture_key=SPEC.key, prompts=(prompt,))


def test_rows_are_read_back_as_they_were_saved(tmp_path: Path) -> None:
    rows, path = rows_of(), tmp_path / "selftest.safetensors"
    rows.save(path)
    found = SelftestRows.read(path)
    assert (found.id, found.capture_key, read_id(path)) == (rows.id, rows.capture_key, rows.id)
    assert found.prompts[0].states.keys() == rows.prompts[0].states.keys()
    assert torch.equal(found.prompts[0].states["r_2"], rows.prompts[0].states["r_2"])
    assert found.prompts[0].input_ids.tolist() == list(range(20))


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 40, b"{}"])
def test_a_damaged_file_is_named_with_what_makes_it_anew(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "selftest.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"rm -f {path} {tmp_path}/server.json"):
        read_id(path)


def test_of_two_servers_that_start_together_the_first_ones_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "capture" / "selftest.safetensors"
    first, second = rows_of(1), rows_of(2)
    assert _publish_first(first, path) is first
    assert _publish_first(second, path).id == first.id
    assert read_id(path) == first.id
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_later_server_with_the_same_rows_passes_and_another_is_refused(tmp_path: Path) -> None:
    kept, path = rows_of(), tmp_path / "selftest.safetensors"
    again = rows_of()
    for state in again.prompts[0].states.values():
        state += 1e-6
    check_same(again.prompts, kept, path=path, spec=SPEC, text={})
    again.prompts[0].states["r_2"] *= 1.01
    with pytest.raises(UserError) as caught:
        check_same(again.prompts, kept, path=path, spec=SPEC, text={})
    message = str(caught.value)
    assert f"other rows than the one whose rows {path} holds" in message
    assert "r_2: the median row differs by 0.01 from that server's, expected at most 0.0001" in (
        message
    )


def test_one_row_of_a_later_server_is_enough_unless_a_router_may_let_it_jump(
    tmp_path: Path,
) -> None:
    kept, again, path = rows_of(), rows_of(), tmp_path / "selftest.safetensors"
    again.prompts[0].states["r_2"][7] *= 1.05
    with pytest.raises(UserError, match=r"r_2: one of 20 rows differs by 0.05 from that server's"):
        check_same(again.prompts, kept, path=path, spec=SPEC, text={})
    check_same(again.prompts, kept, path=path, spec=SPEC, text={"num_experts": 8})


def test_the_last_rows_of_a_later_server_are_judged_by_themselves(tmp_path: Path) -> None:
    """A fault of later positions, such as of a sliding window, is in few of all rows."""
    whole = {f"r_{k}": torch.randn(150, 16) for k in range(4)}
    kept, again = (
        SelftestRows(
            id="x",
            capture_key=SPEC.key,
            prompts=(
                Prompt(
                    input_ids=torch.arange(150, dtype=torch.int32),
                    positions=torch.arange(150),
                    states={name: rows.clone() for name, rows in whole.items()},
                ),
            ),
        )
        for _ in range(2)
    )
    again.prompts[0].states["r_2"][110:] *= 1.01
    with pytest.raises(UserError, match="r_2: the median row differs by 0.01"):
        check_same(again.prompts, kept, path=tmp_path, spec=SPEC, text={"num_experts_per_tok": 2})


def test_chunks_of_several_requests_give_the_first_and_last_rows_of_each(tmp_path: Path) -> None:
    """Two self-test requests and an ordinary one, the first in two chunks."""
    lengths = {"a": 300, "b": 10, "c": 50}
    whole = {name: torch.randn(n, 4) for name, n in lengths.items()}

    def destination(name: str, first_row: int, kind: str) -> Destination:
        return Destination(
            file=".building/shard",
            first_row=first_row,
            rows=lengths[name],
            ids_hash="",
            attempt="",
            kind=kind,
        )

    long, short = destination("a", 0, SELF_TEST), destination("b", 300, SELF_TEST)
    plain = destination("c", 310, PLAIN)

    def batch(starts: list[int], counts: list[int]) -> SimpleNamespace:
        return SimpleNamespace(extend_prefix_lens_cpu=starts, extend_seq_lens_cpu=counts)

    (tmp_path / ".building").mkdir()
    first = torch.cat([whole["c"], whole["a"][:250]])
    keep_rows(
        batch([0, 0], [50, 250]),
        [plain, long],
        [{}, {}],
        {"r_0": first[50:]},
        read=range(50, 300),
        root=tmp_path,
    )
    second = torch.cat([whole["a"][250:], whole["b"]])
    keep_rows(
        batch([250, 0], [50, 10]),
        [long, short],
        [{}, {}],
        {"r_0": second},
        read=range(60),
        root=tmp_path,
    )
    for name, first_row in (("a", 0), ("b", 300)):
        found = read_kept_rows(tmp_path / ".building" / "shard", first_row=first_row)
        expected = kept_positions(lengths[name])
        assert found["positions"].tolist() == expected
        assert torch.equal(found["r_0"], whole[name][expected])
    assert len(kept_positions(300)) == 128
    assert read_kept_rows(tmp_path / ".building" / "shard", first_row=310) == {}


def test_a_refused_request_writes_nothing_and_an_error_of_the_disk_is_answered(
    tmp_path: Path,
) -> None:
    destination = Destination(
        file=".building/shard", first_row=0, rows=3, ids_hash="", attempt="", kind=SELF_TEST
    )
    batch = SimpleNamespace(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[3])
    states = {"r_0": torch.ones(3, 4)}
    refused: list[dict] = [{"error": "lies outside"}]
    keep_rows(batch, [destination], refused, states, read=range(3), root=tmp_path)
    assert refused == [{"error": "lies outside"}]
    answers: list[dict] = [{}]
    keep_rows(batch, [destination], answers, states, read=range(3), root=tmp_path)
    assert answers[0]["error"].startswith("rows of every layer: ")
    assert list(tmp_path.iterdir()) == []
