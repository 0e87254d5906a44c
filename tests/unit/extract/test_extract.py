"""Extraction against a stand-in for the server: what is sent when, what is refused, what is left
behind.
"""

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from synthetic import capture_spec, manifest_with

from draftstates import ids
from draftstates.errors import UserError
from draftstates.extract import client, protocol
from draftstates.extract import extract as extraction
from draftstates.extract.client import Client, Endpoint, Work
from draftstates.extract.extract import ExtractOptions, extract_shard
from draftstates.extract.staging import building_folder
from draftstates.paths import recaptures_of, receipts_of
from draftstates.plan.prefixes import shard_id, share_prefixes
from draftstates.plan.shard_tokens import read_tokens
from draftstates.records import Engine, Figures, Verified, VerifiedSamples
from draftstates.shards import layout

SPEC = capture_spec(
    layers=(1, 2), num_layers=4, hidden_size=4, final_norm="post_norm", stored_dtype="float32"
)


class StandIn:
    """Answers as the instrumented server does and writes receipts; `faults` change what it says of
    a sample, by its length.
    """

    def __init__(self, root: Path, faults: dict[int, dict] | None = None) -> None:
        self.root, self.faults = root, faults or {}
        # by namespace, the ids that were sent in it; where it is kept
        self.cache: dict[str, list[list[int]]] | None = None
        self.lengths: list[int] = []
        self.in_flight = self.most_in_flight = 0

    def written(self, destination: protocol.Destination, cached: int) -> int:
        """Return the rows that the server writes of a request."""
        return destination.rows - max(destination.shared, cached)

    def compared(self, destination: protocol.Destination, cached: int) -> int:
        """Return the shared rows that the server computes and compares with the file's."""
        asked = destination.kind == protocol.COMPARING
        return max(destination.shared - cached, 0) if asked else 0

    def cached(self, body: dict) -> int:
        """Return the tokens that a radix cache has of a request, which it then holds itself."""
        if self.cache is None:
            return 0
        sent = body["input_ids"]
        held = self.cache.setdefault(body["extra_key"], [])
        common = [len(os.path.commonprefix([sent, other])) for other in held]
        held.append(sent)
        return min(max(common, default=0), len(sent) - 1)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        rows = len(body["input_ids"])
        self.lengths.append(rows)
        self.in_flight += rows
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.01)
        self.in_flight -= rows
        fault = self.faults.get(rows, {})
        if "status" in fault:
            return web.Response(status=fault["status"], text="out of order")
        cached = self.cached(body)
        destination = protocol.parse_rid(body["rid"])
        shard = layout.Shard(self.root / destination.file)
        written = destination.first_row, destination.first_row + destination.written
        checksum = layout.sample_checksum(
            *(shard.row_bytes(name, *written) for name in shard.header.states())
        )
        sent = {
            "rows": self.written(destination, cached),
            "chunks": 1,
            "cached_tokens": cached,
            "ids_hash": ids.ids_hash(np.array(body["input_ids"][cached:], np.int32)),
            "checksum": checksum,
            "again_rows": self.compared(destination, cached),
        }
        receipt = protocol.Receipt(rid=body["rid"], **{**sent, **fault.get("receipt", {})})
        path = self.root / destination.file
        with open(protocol.growing_receipts(path), "ab") as file:
            file.write(
                fault.get("line", receipt.line())
                + protocol.synced_line(layout.read_header(path).rows)
            )
        meta = {
            "prompt_tokens": rows,
            "cached_tokens": cached,
            **next_tokens(body["input_ids"], body["top_logprobs_num"]),
            protocol.ANSWER_KEY: [json.dumps({"plugin": "x", "server": "tested"})],
        }
        return web.json_response({"meta_info": {**meta, **fault.get("meta", {})}})


def next_tokens(input_ids: list[int], count: int) -> dict:
    """Return next tokens as SGLang does: the first token of a prompt follows no row."""
    most_likely = [[-float(i), i, None] for i in range(count)]
    return {
        "input_token_logprobs": [[-1.0, token, None] for token in input_ids],
        "input_top_logprobs": [None, *[most_likely] * (len(input_ids) - 1)],
        "output_token_logprobs": most_likely[:1],
        "output_top_logprobs": [most_likely],
    }


def with_server(stand_in: StandIn, action) -> object:
    """Run `action(endpoint)` in a thread while the stand-in serves."""

    async def go() -> object:
        app = web.Application()
        app.router.add_post("/generate", stand_in.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        endpoint = Endpoint(
            url=f"http://127.0.0.1:{port}", api_key=None, root=stand_in.root, server="tested"
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(None, action, endpoint)
        finally:
            await runner.cleanup()

    return asyncio.run(go())


def planned(folder: Path, lengths: list[int], *, target: int = 1) -> Path:
    """Return the file of a planned shard's tokens; the mask's values are all `target`."""
    samples = [np.full(n, n, dtype=np.int32) for n in lengths]
    masks = [np.full(n, target, dtype=np.uint8) for n in lengths]
    names = [ids.sample_id(s, mask) for s, mask in zip(samples, masks, strict=True)]
    path = folder / f"{ids.shard_id(names)}.parquet"
    pq.write_table(pa.table({"sample_id": names, "input_ids": samples, "loss_mask": masks}), path)
    return path


def extract(
    tmp_path: Path,
    faults: dict[int, dict] | None = None,
    lengths: tuple = (3, 9, 6),
    *,
    target: int = 1,
    reuse: bool = True,
    path: Path | None = None,
) -> tuple[StandIn, Path]:
    stand_in = StandIn(tmp_path, faults)
    path = path or planned(tmp_path, list(lengths), target=target)
    tokens = read_tokens(path, shard_id=path.stem)
    output = tmp_path / "shards" / f"{path.stem}.safetensors"
    options = ExtractOptions(recapture_minimum=1, reuse=reuse)

    def action(endpoint: Endpoint) -> None:
        extract_shard(
            tokens,
            spec=SPEC,
            endpoint=endpoint,
            engine="x",
            options=options,
            output=output,
            planned=[],
        )

    try:
        with_server(stand_in, action)
    finally:
        assert not (tmp_path / "shards" / ".building").exists()
    return stand_in, output


def test_a_complete_shard_gets_its_name_with_receipts_and_recaptures_beside_it(
    tmp_path: Path,
) -> None:
    stand_in, output = extract(tmp_path)
    recaptures, receipts = recaptures_of(output), receipts_of(output)
    for published in (output, recaptures, receipts):
        assert not published.stat().st_mode & 0o222
    said = json.loads(receipts.read_text())
    assert [s["rows"] for s in said["samples"]] == [3, 9, 6]
    assert len(said["recaptures"]) == 1
    assert recaptures.exists()
    assert layout.Shard(output).input_ids.tolist() == [3] * 3 + [9] * 9 + [6] * 6


def test_a_shard_that_has_its_name_is_not_lost_by_a_job_that_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(
        "draftstates.extract.extract.result_is_complete",
        lambda: found.append(sorted(path.name for path in tmp_path.glob("shards/[0-9a-f]*"))),
    )
    _, output = extract(tmp_path)
    complete = (output, recaptures_of(output), receipts_of(output))
    assert found == [sorted(path.name for path in complete)]


def sharing(folder: Path) -> Path:
    """Return the file of a planned shard: the second sample has 8 rows of the first."""
    samples = [np.arange(n, dtype=np.int32) for n in (9, 12)]
    samples[1][8:] += 1
    names = [ids.sample_id(s, np.ones(len(s))) for s in samples]
    segments = share_prefixes(np.concatenate(samples), [9, 12], minimum=4)
    path = folder / f"{shard_id(names, segments)}.parquet"
    columns = {
        "sample_id": names,
        "input_ids": samples,
        "loss_mask": [np.ones(len(s), np.uint8) for s in samples],
        "segments": [[0, 9], [0, 8, 9, 4]],
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_a_sample_that_shares_rows_is_sent_whole_and_written_without_them(tmp_path: Path) -> None:
    stand_in, output = extract(tmp_path, path=sharing(tmp_path))
    said = json.loads(receipts_of(output).read_text())
    recaptured = [entry["rows"] for entry in said["recaptures"]]
    assert sorted(stand_in.lengths) == sorted([9, 12, *recaptured])
    fields = ("first_row", "rows", "shared_rows", "prompt_tokens")
    assert [tuple(s.get(name, 0) for name in fields) for s in said["samples"]] == [
        (0, 9, 0, 9),
        (9, 4, 8, 12),
    ]
    assert layout.read_header(output).rows == 13


@pytest.mark.parametrize("rows", [3, 12])
def test_more_or_fewer_written_rows_than_those_of_its_own_fail_a_sample(
    tmp_path: Path, rows: int
) -> None:
    with pytest.raises(UserError, match=f"{rows} of 4 rows captured"):
        extract(tmp_path, {12: {"receipt": {"rows": rows}}}, path=sharing(tmp_path))


def test_last_states_that_the_server_reports_stay_in_the_receipts(tmp_path: Path) -> None:
    faults = {n: {"receipt": {"last_state": f"AAA{n}"}} for n in range(1, 10)}
    _, output = extract(tmp_path, faults)
    said = json.loads(receipts_of(output).read_text())
    assert [sample["last_state"] for sample in said["samples"]] == ["AAA3", "AAA9", "AAA6"]
    assert [f"AAA{again['rows']}" for again in said["recaptures"]] == [
        again["last_state"] for again in said["recaptures"]
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"receipt": {"rows": 1}, "meta": {"cached_tokens": 8}},
            "1 of 9 rows captured: 8 came from a cache",
        ),
        ({"receipt": {"ids_hash": "0" * 16}}, "the rows are those of other ids"),
        ({"receipt": {"error": "OSError: No space left on device"}}, "No space left on device"),
        ({"receipt": {"last_state": 7}}, "is no receipt"),
        ({"line": b'{"rid": "'}, "is no receipt"),
        ({"meta": {"prompt_tokens": 10}}, "9 tokens sent, the server counted 10"),
        ({"meta": {"cached_tokens": 2}}, "2 tokens came from a cache"),
        ({"meta": {protocol.ANSWER_KEY: None}}, "without the draftstates plug-in"),
        (
            {
                "meta": {
                    protocol.ANSWER_KEY: [
                        json.dumps({"plugin": "x", "error": "the server sees no file"})
                    ]
                }
            },
            "the server sees no file",
        ),
        (
            {"meta": {protocol.ANSWER_KEY: [json.dumps({"plugin": "x", "server": "another"})]}},
            "expected the server tested, which passed the self-test, found another",
        ),
        (
            {"meta": {protocol.ANSWER_KEY: [json.dumps({"plugin": "x"})]}},
            "expected the server tested, which passed the self-test, found None",
        ),
        ({"status": 503}, "the server answered 503: out of order"),
    ],
)
def test_a_sample_that_fails_is_tried_again_alone_then_named_and_nothing_is_left(
    tmp_path: Path, fault: dict, message: str
) -> None:
    name = ids.sample_id(np.full(9, 9, dtype=np.int32), np.ones(9))
    with pytest.raises(UserError, match=message) as caught:
        extract(tmp_path, {9: fault})
    assert name in str(caught.value)
    assert "exclude" in str(caught.value)
    assert not [path for path in (tmp_path / "shards").iterdir() if path.is_file()]


def mark_verified(output: Path) -> None:
    """What verification would say of a shard."""
    said = json.loads(receipts_of(output).read_text())
    folder = output.parent.parent / "verified"
    samples, size = said["samples"], output.stat().st_size
    Verified(
        shard_id=output.stem,
        capture_key=SPEC.key,
        engine=Engine(name="x", version="0"),
        images={},
        bytes=size,
        checksum="0" * 32,
        samples=VerifiedSamples(
            sample_id=tuple(sample["sample_id"] for sample in samples),
            tokens=tuple(sample["rows"] for sample in samples),
            supervised_tokens=tuple(sample["rows"] for sample in samples),
            checksum=tuple(sample["checksum"] for sample in samples),
        ),
        figures=Figures(
            recaptures=0, recaptured_tokens=0, alignment_share_of_limit=0.0, prefix_distance=0.0
        ),
    ).publish(folder / f"{output.stem}.json")


@pytest.mark.parametrize(("tokens_in_flight", "sent"), [(65536, 5), (1, 2)])
def test_where_no_receipts_come_not_every_sample_waits_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens_in_flight: int, sent: int
) -> None:
    """A full disk takes no receipts: each attempt waits its whole time for one, and a shard has
    thousands of samples.
    """
    monkeypatch.setattr(client, "_RECEIPT_DEADLINE_SECONDS", 0.2)
    stand_in, path = (
        StandIn(tmp_path, dict.fromkeys((3, 6, 9), {"line": b""})),
        planned(tmp_path, [3, 6, 9]),
    )
    tokens, output = (
        read_tokens(path, shard_id=path.stem),
        tmp_path / "shards" / f"{path.stem}.safetensors",
    )
    more = {"spec": SPEC, "engine": "x", "output": output, "planned": []}
    more["options"] = ExtractOptions(recapture_minimum=1, tokens_in_flight=tokens_in_flight)
    with pytest.raises(UserError, match=r"(?s)^3 samples could not be captured.*no receipt after"):
        with_server(stand_in, lambda endpoint: extract_shard(tokens, endpoint=endpoint, **more))
    # A prefix, the samples that are sent before it has waited in vain, and one of them again.
    assert len(stand_in.lengths) == sent


def test_one_sample_more_costs_that_sample_and_the_recaptures(tmp_path: Path) -> None:
    _, output = extract(tmp_path)
    mark_verified(output)
    stand_in, new = extract(tmp_path, lengths=(3, 20, 9, 6))
    said = json.loads(receipts_of(new).read_text())
    recaptures = [entry["rows"] for entry in said["recaptures"]]
    assert sorted(stand_in.lengths) == sorted([20, *recaptures])
    assert [entry["position"] for entry in said["recaptures"]] == [1], (
        "the new sample is recaptured"
    )
    assert [(s["rows"], s.get("copied_from")) for s in said["samples"]] == [
        (3, output.stem),
        (20, None),
        (9, output.stem),
        (6, output.stem),
    ]
    assert [s["first_row"] for s in said["samples"]] == [0, 3, 23, 32]


def test_without_reuse_every_row_is_captured_again(tmp_path: Path) -> None:
    _, output = extract(tmp_path)
    mark_verified(output)
    stand_in, new = extract(tmp_path, target=0, reuse=False)
    said = json.loads(receipts_of(new).read_text())
    assert sorted(stand_in.lengths) == sorted(
        [3, 9, 6, *(entry["rows"] for entry in said["recaptures"])]
    )
    assert not any("copied_from" in sample for sample in said["samples"])


def test_another_mask_costs_the_recaptures_alone(tmp_path: Path) -> None:
    _, output = extract(tmp_path)
    mark_verified(output)
    stand_in, new = extract(tmp_path, target=0)
    assert new != output
    assert stand_in.lengths == [
        entry["rows"] for entry in json.loads(receipts_of(new).read_text())["recaptures"]
    ]


def test_tokens_in_flight_are_bounded_and_the_longest_go_first(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path)
    # the last is a prefix
    lengths = [5, 40, 10, 30, 20, 60, 7]
    path = tmp_path / "s.safetensors"
    layout.create(
        path,
        spec=SPEC,
        shard_id="s",
        sample_ids=[str(n) for n in lengths],
        lengths=lengths,
        input_ids=np.zeros(sum(lengths), np.int32),
        loss_mask=np.ones(sum(lengths)),
    )
    starts = np.cumsum([0, *lengths])
    work = [
        Work(
            sample_id=str(n),
            shard=path,
            first_row=int(s),
            input_ids=np.zeros(n, np.int32),
            prefix=n == 7,
        )
        for n, s in zip(lengths, starts, strict=False)
    ]

    def action(endpoint: Endpoint) -> tuple:
        async def go() -> tuple:
            async with Client(endpoint, tokens_in_flight=50) as client:
                return await client.capture(work, retries=0)

        return asyncio.run(go())

    captured, refused = with_server(stand_in, action)
    assert not refused
    assert [len(c.work.input_ids) for c in captured] == lengths
    assert stand_in.lengths == [
        60,
        40,
        30,
        7,
        20,
        10,
        5,
    ], "what is longer than the limit goes alone; the prefix in the middle"
    assert stand_in.most_in_flight == 60


def test_what_a_killed_attempt_left_is_cleared_and_what_is_in_work_is_not(tmp_path: Path) -> None:
    left = tmp_path / ".building" / "abc-1"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (left / "shard.safetensors").write_bytes(b"x")
    with building_folder(tmp_path / ".building", "abc") as first:
        assert not left.exists()
        with building_folder(tmp_path / ".building", "abc") as second:
            assert first.exists()
            assert first != second
    assert not (tmp_path / ".building").exists()


@pytest.mark.parametrize(
    ("listed", "stays"), [("itself", False), ("other", True), ("unreadable", False)]
)
def test_no_manifest_lists_a_shard_that_is_made_anew_and_not_yet_verified(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listed: str,
    stays: bool,
) -> None:
    """Readers take what a manifest lists for verified; the next one is written after verification,
    if that passes.
    """
    shard_id = planned(tmp_path, [3, 9, 6]).stem
    manifest = tmp_path / "manifest.json"
    manifest_with(["1" * 32, shard_id if listed == "itself" else "2" * 32]).publish(manifest)
    if listed == "unreadable":
        manifest.write_text("{")
    there: list[bool] = []
    publish = extraction.publish

    def watched(source: Path, final: Path, **how: bool) -> None:
        there.append(manifest.exists())
        publish(source, final, **how)

    monkeypatch.setattr(extraction, "publish", watched)
    extract(tmp_path)
    assert there == [stays] * 3, "it goes before anything of the new shard has a final name"
    assert manifest.exists() == stays
    lines = [
        line for line in capsys.readouterr().err.splitlines() if f"{manifest} was removed" in line
    ]
    assert len(lines) == (0 if stays else 1)
    assert listed != "itself" or shard_id in lines[0]


def test_a_shard_that_could_not_be_made_takes_no_manifest_away(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"shards": [{"shard_id": planned(tmp_path, [3, 9, 6]).stem}]}))
    with pytest.raises(UserError, match="could not be captured"):
        extract(tmp_path, {9: {"status": 500}})
    assert manifest.exists()


def test_tokens_of_another_shard_are_refused(tmp_path: Path) -> None:
    path = planned(tmp_path, [3])
    with pytest.raises(UserError, match="expected the tokens of shard"):
        read_tokens(path, shard_id="0" * 32)
    with pytest.raises(UserError, match="cannot be read"):
        read_tokens(tmp_path / "gone.parquet", shard_id="0" * 32)


def test_a_full_disk_fails_before_the_first_request_and_leaves_nothing(tmp_path: Path) -> None:
    huge = dataclasses.replace(SPEC, hidden_size=1 << 44)
    with pytest.raises(UserError, match="no room for"):
        layout.create(
            tmp_path / "s",
            spec=huge,
            shard_id="s",
            sample_ids=["a"],
            lengths=[4],
            input_ids=np.zeros(4),
            loss_mask=np.ones(4),
        )
    assert not (tmp_path / "s").exists()
