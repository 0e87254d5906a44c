"""A server that lies in any field of its answers and receipts: each sample is captured or failed by
name, whatever it says. No exception, no hang.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fuzz import JSON, changed
from hypothesis import given
from hypothesis import strategies as st
from synthetic import capture_spec

from draftstates import ids
from draftstates.errors import UserError
from draftstates.extract import client, protocol
from draftstates.extract.client import Client, Endpoint, Work
from draftstates.server.address import health, server_info
from draftstates.shards import layout

SPEC = capture_spec(layers=(1,), num_layers=2, hidden_size=4, stored_dtype="float32")
IDS = np.arange(1, 4, dtype=np.int32)
META = {
    "prompt_tokens": 3,
    "cached_tokens": 0,
    "output_top_logprobs": [[[-float(i), i, None] for i in range(5)]],
    protocol.ANSWER_KEY: [json.dumps({"plugin": "x"})],
}
PREFIX = {
    **META,
    "input_token_logprobs": [[None, 1, None], [-1.0, 2, None], [-2.5, 3, None]],
    "input_top_logprobs": [None, *[[[-0.5, 7, None], [-1.0, 2, None]]] * 2],
    "output_token_logprobs": [[-0.5, 9, None]],
    "output_top_logprobs": [[[-0.5, 9, None], [-0.75, 8, None]]],
}
PLUGIN = {"plugin": "x", "opinions": {"1": 0.0}, "no_capture": "", "settings": {}, "weights": "x"}
RECEIPT = {
    "rid": "",
    "rows": 3,
    "chunks": 1,
    "cached_tokens": 0,
    "ids_hash": ids.ids_hash(IDS),
    "checksum": "0" * 32,
    "error": None,
}
LINE = (
    changed(RECEIPT).map(lambda entry: json.dumps(entry).encode())
    | JSON.map(lambda entry: json.dumps(entry).encode())
    | st.binary(max_size=20)
    | st.just(b"[" * 20_000)
    | st.fixed_dictionaries({"synced": JSON}).map(lambda entry: json.dumps(entry).encode())
)
ANSWER = (
    changed(PLUGIN).map(
        lambda own: json.dumps({"meta_info": {**META, protocol.ANSWER_KEY: [json.dumps(own)]}})
    )
    | changed({"meta_info": META, "text": ""}).map(json.dumps)
    | JSON.map(json.dumps)
    | st.text(max_size=20)
    | st.just("[" * 20_000)
)


@pytest.fixture(autouse=True)
def short_waits() -> Iterator[None]:
    """A receipt that does not come is waited for a moment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_RECEIPT_DEADLINE_SECONDS", 0.05)
        yield


async def capture(
    answer: str | None, line: bytes | None, *, prefix: bool = False
) -> tuple[list[Any], dict[int, str]]:
    """Capture one sample from a server that gives this answer and writes this receipt.

    None stands for what an honest server gives.
    """
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder, "shard.safetensors")
        layout.create(
            shard,
            spec=SPEC,
            shard_id="0" * 32,
            sample_ids=["0" * 32],
            lengths=[3],
            input_ids=IDS,
            loss_mask=np.ones(3, np.uint8),
        )

        async def generate(request: web.Request) -> web.Response:
            body = await request.json()
            written = line if line is not None else _line({**RECEIPT, "rid": body["rid"]})
            with open(protocol.growing_receipts(shard), "ab") as file:
                file.write(written + b"\n")
            text = answer if answer is not None else json.dumps({"meta_info": META})
            return web.Response(body=text.encode("utf-8", "surrogatepass"))

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        endpoint = Endpoint(url=url, api_key=None, root=Path(folder))
        try:
            async with Client(endpoint, tokens_in_flight=10) as asked:
                one = Work(sample_id="a", shard=shard, first_row=0, input_ids=IDS, prefix=prefix)
                work = [one]
                return await asyncio.wait_for(asked.capture(work, retries=0), 20)
        finally:
            await runner.cleanup()


def _line(receipt: dict[str, Any]) -> bytes:
    return json.dumps(receipt).encode()


def test_an_honest_server_is_believed() -> None:
    captured, reasons = asyncio.run(capture(None, None))
    assert reasons == {}
    assert captured[0].top == [[i, -float(i)] for i in range(5)]


def test_of_a_prefix_recapture_the_next_tokens_of_every_row_are_taken() -> None:
    captured, reasons = asyncio.run(capture(json.dumps({"meta_info": PREFIX}), None, prefix=True))
    assert reasons == {}
    best = [[7, -0.5], [2, -1.0]]
    assert captured[0].rows == [
        [*best, [2, -1.0]],
        [*best, [3, -2.5]],
        [[9, -0.5], [8, -0.75], [9, -0.5]],
    ]
    assert captured[0].top is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None], [-1.0, 4, None]]},
            r"\[2, 4\]",
        ),
        ({"input_token_logprobs": PREFIX["input_token_logprobs"][:2]}, "of every row"),
        ({"input_top_logprobs": [None, None, None]}, "of every row"),
        ({"output_top_logprobs": META["output_top_logprobs"]}, "expected 2 tokens"),
        ({"output_token_logprobs": [[float("nan"), 9, None]]}, "of every row"),
        ({"input_token_logprobs": None}, "of every row"),
    ],
)
def test_a_prefix_recapture_with_next_tokens_of_others_is_failed(change: dict, said: str) -> None:
    answer = json.dumps({"meta_info": {**PREFIX, **change}})
    captured, reasons = asyncio.run(capture(answer, None, prefix=True))
    assert captured == []
    assert re.search(said, reasons[0])


@pytest.mark.parametrize(("named", "kept"), [(2, False), (3, True)])
def test_the_last_token_of_the_vocabulary_is_named_0_by_the_server(named: int, kept: bool) -> None:
    """Another token that it names 0 is not the one that was sent."""
    tokens = [[None, 1, None], [-1.0, 2, None], [-2.5, 3, None]]
    tokens[named - 1][1] = 0
    answer = json.dumps({"meta_info": {**PREFIX, "input_token_logprobs": tokens}})
    captured, reasons = asyncio.run(capture(answer, None, prefix=True))
    assert [item.rows[1][-1] for item in captured] == ([[3, -2.5]] if kept else [])
    assert bool(reasons) != kept


@given(changed({"meta_info": PREFIX}).map(json.dumps))
def test_whatever_the_answer_to_a_prefix_recapture_is_it_is_captured_or_failed(answer: str) -> None:
    captured, reasons = asyncio.run(capture(answer, None, prefix=True))
    assert len(captured) + len(reasons) == 1
    for item in captured:
        assert [len(row) for row in item.rows] == [3, 3, 3]


@given(ANSWER)
def test_whatever_the_answer_is_a_sample_is_captured_or_failed_by_name(answer: str) -> None:
    captured, reasons = asyncio.run(capture(answer, None))
    assert len(captured) + len(reasons) == 1
    for item in captured:
        assert (item.prompt_tokens, len(item.top)) == (3, 5)


@given(LINE)
def test_whatever_the_receipt_is_a_sample_is_failed_by_name(line: bytes) -> None:
    captured, reasons = asyncio.run(capture(None, line))
    assert captured == []
    assert list(reasons) == [0]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00\xff",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 999 \r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
    ],
)
def test_another_program_on_the_port_is_no_server(sent: bytes) -> None:
    async def go() -> tuple[str | None, str]:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(sent)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            problem = await asyncio.to_thread(health, url, seconds=5.0)
            with pytest.raises(UserError, match="expected an SGLang server") as refused:
                await asyncio.to_thread(server_info, url, api_key=None)
        return problem, str(refused.value)

    problem, _ = asyncio.run(go())
    assert problem or sent.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("info", [b"[]", b"1", b'{"version": 5}', b"{}", b"[" * 20_000, b"\xff"])
def test_a_server_that_reports_no_version_is_no_sglang(info: bytes) -> None:
    async def go() -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=info)

        app = web.Application()
        app.router.add_get("/server_info", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            with pytest.raises(UserError, match="expected an SGLang server"):
                await asyncio.to_thread(server_info, url, api_key=None)
        finally:
            await runner.cleanup()

    asyncio.run(go())
