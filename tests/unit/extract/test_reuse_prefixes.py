"""Shared prefixes that are computed once: what is sent when and in which namespace, and what a
cache may have given. Without a cache: which samples are compared with the rows that they share.
"""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from test_extract import SPEC, StandIn, with_server

from draftstates import ids
from draftstates.errors import UserError
from draftstates.extract import protocol
from draftstates.extract.client import CaptureFailed, Client, Endpoint
from draftstates.extract.extract import ExtractOptions, extract_shard
from draftstates.paths import receipts_of
from draftstates.plan.prefixes import shard_id, share_prefixes
from draftstates.plan.shard_tokens import read_tokens

# the second and the third share rows of the first, the fourth those of both; the last shares none
SAMPLES = [
    [*range(100, 120)],
    [*range(100, 112), *range(200, 209)],
    [*range(100, 107), *range(300, 311)],
    [*range(100, 112), *range(200, 206), *range(400, 404)],
    [*range(500, 516)],
]
SHARED = [0, 12, 7, 18, 0]


def planned(folder: Path, samples: list[list[int]] = SAMPLES, shared: list[int] = SHARED) -> Path:
    parts = [np.array(sample, np.int32) for sample in samples]
    masks = [np.ones(len(part), np.uint8) for part in parts]
    names = [ids.sample_id(part, mask) for part, mask in zip(parts, masks, strict=True)]
    segments = share_prefixes(np.concatenate(parts), list(map(len, parts)), minimum=4)
    assert [segments.shared(index) for index in range(len(samples))] == shared
    path = folder / f"{shard_id(names, segments)}.parquet"
    places = [np.ravel(segments.of_sample(index)).tolist() for index in range(len(samples))]
    columns = {"sample_id": names, "input_ids": parts, "loss_mask": masks, "segments": places}
    pq.write_table(pa.table(columns), path)
    return path


class Server(StandIn):
    """A stand-in with a radix cache, which notes the order of the requests and their namespaces."""

    def __init__(self, root: Path, faults: dict[int, dict] | None = None) -> None:
        super().__init__(root, faults)
        self.cache = {}
        self.sent: list[tuple[int, str]] = []

    def cached(self, body: dict) -> int:
        self.sent.append((len(body["input_ids"]), body["extra_key"]))
        return super().cached(body)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the reasons of the attempts that fail."""
    found, send = [], Client._send

    async def noted(self: Client, *arguments: object) -> object:
        try:
            return await send(self, *arguments)
        except CaptureFailed as error:
            found.append(str(error))
            raise

    monkeypatch.setattr(Client, "_send", noted)
    return found


def is_sample(body: dict, length: int) -> bool:
    """Return whether a request is that of the sample of this length, and no recapture of it."""
    return len(body["input_ids"]) == length and "recaptures" not in body["rid"]


def extract(
    server: Server,
    folder: Path,
    *,
    reuse_prefixes: bool = True,
    path: Path | None = None,
    **options: object,
) -> list[dict]:
    """Capture the planned shard; return the receipts of its samples."""
    path = path or planned(folder)
    output = folder / "shards" / f"{path.stem}.safetensors"

    def action(endpoint: Endpoint) -> None:
        extract_shard(
            read_tokens(path, shard_id=path.stem),
            spec=SPEC,
            endpoint=dataclasses.replace(
                endpoint, fresh_namespace=True, reuse_prefixes=reuse_prefixes
            ),
            engine="x",
            options=ExtractOptions(**{"recapture_minimum": 1, **options}),
            output=output,
            planned=[],
        )

    with_server(server, action)
    return json.loads(receipts_of(output).read_text())["samples"]


@pytest.mark.parametrize("tokens_in_flight", [1, 40, 65536])
def test_a_sample_follows_those_whose_rows_it_shares_and_all_of_them_are_cached(
    tmp_path: Path, tokens_in_flight: int
) -> None:
    server = Server(tmp_path)
    receipts = extract(server, tmp_path, tokens_in_flight=tokens_in_flight)
    assert [receipt["cached_tokens"] for receipt in receipts] == SHARED
    assert [r["rows"] + r.get("shared_rows", 0) for r in receipts] == list(map(len, SAMPLES))
    first, second, third, fourth, other = (receipt["namespace"] for receipt in receipts)
    assert first == second == third == fourth != other
    lengths = [length for length, namespace in server.sent if namespace == first]
    assert sorted(lengths) == [18, 20, 21, 22]
    assert lengths[0] == 20
    assert lengths.index(21) < lengths.index(22)


def test_a_prefix_recapture_is_sent_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    server = Server(tmp_path)
    names = [receipt["namespace"] for receipt in extract(server, tmp_path, recapture_fraction=1.0)]
    others = [namespace for _, namespace in server.sent if namespace not in names]
    assert len(others) == len(set(others)) == len(SAMPLES)


def test_each_attempt_at_a_shard_has_namespaces_of_its_own(tmp_path: Path) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    extract(one, tmp_path)
    extract(two, tmp_path)
    assert not set(one.cache) & set(two.cache)


@pytest.mark.parametrize(
    ("cached", "message"),
    [(15, "6 of 9 rows captured: 15 came from a cache"), (13, "8 of 9 rows captured: 13 came")],
)
def test_a_hit_beyond_the_plan_is_captured_again_without_the_cache(
    tmp_path: Path,
    cached: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    failures: list[str],
) -> None:
    """A server that says more cached tokens than the plan shares writes too few rows."""
    server = Server(tmp_path)
    honest = server.cached

    def more(body: dict) -> int:
        found = honest(body)
        return cached if is_sample(body, 21) and found else found

    monkeypatch.setattr(server, "cached", more)
    fill = server.written
    monkeypatch.setattr(
        server, "written", lambda destination, n: min(fill(destination, n), destination.rows - n)
    )
    receipts = extract(server, tmp_path)
    assert any(message in failure for failure in failures), failures
    assert (receipts[1]["cached_tokens"], receipts[1]["attempts"]) == (0, 2)
    assert receipts[1]["namespace"] not in {receipts[0]["namespace"], receipts[2]["namespace"]}


def test_a_hit_in_a_namespace_that_nobody_filled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another shard's, or of the same shard's earlier attempt."""
    server = Server(tmp_path)
    monkeypatch.setattr(server, "cached", lambda body: 3 if is_sample(body, 16) else 0)
    with pytest.raises(UserError, match="13 of 16 rows captured: 3 came from a cache"):
        extract(server, tmp_path)


def test_rows_of_an_evicted_parent_come_again_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    monkeypatch.setattr(server, "cached", lambda body: 5 if is_sample(body, 21) else 0)
    receipts = extract(server, tmp_path)
    assert [receipt["cached_tokens"] for receipt in receipts] == [0, 5, 0, 0, 0]
    assert [receipt["rows"] for receipt in receipts] == [20, 9, 11, 4, 16]


def test_after_a_parent_that_failed_nothing_is_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt at the first sample fails; those that share its rows do not wait for ever,
    and are computed whole. The fourth is compared with its rows, and so sent after it.
    """
    server, tries = Server(tmp_path), []
    honest = server.cached

    def once(body: dict) -> int:
        if is_sample(body, 20):
            tries.append(1)
            if len(tries) == 1:
                honest(body)
                return 3
        return honest(body)

    monkeypatch.setattr(server, "cached", once)
    receipts = extract(server, tmp_path)
    assert [receipt["attempts"] for receipt in receipts] == [2, 1, 1, 2, 1]
    assert [receipt["cached_tokens"] for receipt in receipts] == [0] * 5
    assert len({receipt["namespace"] for receipt in receipts}) == 5


def test_a_receipt_of_other_cached_tokens_than_the_answer_fails_the_sample(
    tmp_path: Path, failures: list[str]
) -> None:
    server = Server(tmp_path, {21: {"receipt": {"cached_tokens": 9}}})
    with pytest.raises(UserError, match="9 tokens came from a cache, expected 0"):
        extract(server, tmp_path)
    assert "12 tokens came from a cache, the receipt has 9" in failures


def test_a_child_does_not_hold_room_while_it_waits(tmp_path: Path) -> None:
    """Otherwise children of one sample would fill all room, and the sample could not be sent."""
    server = Server(tmp_path)
    asyncio.run(
        asyncio.wait_for(asyncio.to_thread(extract, server, tmp_path, tokens_in_flight=1), 30)
    )
    assert server.most_in_flight == max(map(len, SAMPLES))


class Comparing(Server):
    """A stand-in without a cache, which notes what was answered before each comparing request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cache = None
        self.answered: list[int] = []
        self.before: dict[int, list[int]] = {}

    def cached(self, body: dict) -> int:
        return 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        length = len(body["input_ids"])
        if protocol.parse_rid(body["rid"]).kind == protocol.COMPARING:
            self.before.setdefault(length, list(self.answered))
        answer = await super().generate(request)
        self.answered.append(length)
        return answer


@pytest.mark.parametrize(("fraction", "chosen"), [(0.01, 1), (0.5, 2), (1.0, 3)])
@pytest.mark.parametrize("tokens_in_flight", [1, 65536])
def test_shared_rows_of_chosen_samples_are_compared_once_they_are_written(
    tmp_path: Path, fraction: float, chosen: int, tokens_in_flight: int
) -> None:
    server = Comparing(tmp_path)
    receipts = extract(
        server,
        tmp_path,
        reuse_prefixes=False,
        recapture_fraction=fraction,
        tokens_in_flight=tokens_in_flight,
    )
    lengths = list(map(len, SAMPLES))
    compared = [i for i, receipt in enumerate(receipts) if receipt.get("again_rows")]
    assert sorted(server.before) == sorted(lengths[i] for i in compared)
    assert len(compared) == chosen
    for index in compared:
        assert receipts[index]["again_rows"] == SHARED[index]
        owners = {20, 21} if index == 3 else {20}
        assert owners <= {*server.before[lengths[index]]}


def test_a_sample_that_is_compared_is_not_the_last_one(tmp_path: Path) -> None:
    """What it waits for comes first, though others are longer: alone, it would take a pass more."""
    server = Comparing(tmp_path)
    longest = [*range(600, 640)]
    path = planned(tmp_path, [*SAMPLES, longest, longest[::-1]], [*SHARED, 0, 0])
    extract(server, tmp_path, reuse_prefixes=False, tokens_in_flight=1, path=path)
    (compared,) = server.before
    assert server.answered[0] == 20
    # one more was on its way to the server
    assert server.answered.index(compared) <= 2


def test_a_server_that_compares_nothing_fails_a_sample_that_is_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Comparing(tmp_path)
    monkeypatch.setattr(server, "compared", lambda destination, cached: 0)
    with pytest.raises(UserError, match="0 shared rows were compared with the file's, expected"):
        extract(server, tmp_path, reuse_prefixes=False)


def test_after_a_sample_that_failed_the_one_that_is_compared_with_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: list[str]
) -> None:
    server, tries = Comparing(tmp_path), []

    def once(body: dict) -> int:
        if is_sample(body, 20):
            tries.append(1)
            return 3 * (len(tries) == 1)
        return 0

    monkeypatch.setattr(server, "cached", once)
    receipts = extract(server, tmp_path, reuse_prefixes=False, recapture_fraction=1.0)
    assert [receipt["attempts"] for receipt in receipts] == [2, 2, 2, 2, 1]
    assert [receipt.get("again_rows", 0) for receipt in receipts] == SHARED
    # not sent in vain
    assert len(failures) == 1
