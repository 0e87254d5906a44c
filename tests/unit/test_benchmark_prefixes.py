"""The capture benchmarks against stand-ins for the servers: what a plain request is, what the modes
send, and the figures of the table.
"""

import argparse
import json
import sys
from pathlib import Path

import pytest
from aiohttp import web

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parent / "extract"))
import prefixes
from server_harness import Running
from test_extract import SPEC, StandIn, with_server

STRUCTURE = [[(40, -1, 0), (60, 0, 30), (90, 1, 60)], [(50, -1, 0)], [(70, -1, 0), (80, 0, 70)]]
TOKENS, SHARED = 390, 160


class Server(StandIn):
    """Stand-in that answers plain requests too, and counts both kinds."""

    def __init__(self, root: Path, *, cache: bool = False) -> None:
        super().__init__(root)
        self.cache = {} if cache else None
        self.plain: list[dict] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "rid" in body:
            return await super().generate(request)
        self.plain.append(body)
        return web.json_response({"meta_info": {"cached_tokens": self.cached(body)}})


def test_each_mode_sends_what_its_name_says_and_the_table_has_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stand_ins = {
        name: Server(tmp_path, cache=name in ("cached", "reusing"))
        for name in ("plain", "cached", "capture", "reusing")
    }
    arguments = argparse.Namespace(
        modes=list(prefixes.SERVERS),
        to=[f"here={tmp_path}"],
        tokens_in_flight=1000,
        min_shared_tokens=20,
        shards=1,
        repeats=2,
    )
    servers: dict[str, list[Running]] = {}

    def measure(names: list[str]) -> str:
        if not names:
            return prefixes.measure(servers, STRUCTURE, arguments, vocabulary=1000)

        def action(endpoint: object) -> str:
            servers[names[0]] = [Running(endpoint, SPEC, tmp_path, None, tmp_path)]
            return measure(names[1:])

        return with_server(stand_ins[names[0]], action)

    table = measure(list(stand_ins))
    measured = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    figures = {
        name: [(each.get("cached"), each.get("again")) for each in measured if each["mode"] == name]
        for name in {each["mode"] for each in measured}
    }
    # one sample is chosen, whose shared rows are compared
    ((_, compared), _) = stored_once = figures.pop("stored once:here")
    assert stored_once == [(0, compared)] * 2
    assert compared in {30, 60, 70}
    assert figures == {
        "plain": [(None, None)] * 2,
        "plain, cached": [(SHARED, None)] * 2,
        "off:here": [(0, 0)] * 2,
        "computed once:here": [(SHARED, 0)] * 2,
    }
    assert {each["tokens"] for each in measured} == {TOKENS}
    sent = {name: server.lengths for name, server in stand_ins.items()}
    assert not sent["plain"] and not sent["cached"] and sent["capture"] and sent["reusing"]
    assert not stand_ins["capture"].plain and not stand_ins["reusing"].plain
    for body in stand_ins["plain"].plain:
        assert {*body} == {"input_ids", "sampling_params"}
    assert {len(s["input_ids"]) for s in stand_ins["plain"].plain} >= {40, 60, 90, 50, 70, 80}
    rows = [line for line in table.splitlines() if line.startswith("| stored once:here")]
    stored, whole = (
        next(each["bytes"] for each in measured if each["mode"] == mode)
        for mode in ("stored once:here", "off:here")
    )
    assert f"| {stored / whole:.4f} |" in rows[0]
    assert whole - stored > 0.9 * SHARED * SPEC.row_bytes
    assert [path.name for path in tmp_path.iterdir()] == []
