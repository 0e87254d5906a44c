"""The examination of real servers: with and without the radix cache, in chunks."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_harness import Running
from synthetic import plan_with

from draftstates.paths import Results
from draftstates.report.doctor_server import Examination, examine

pytestmark = pytest.mark.server


@contextlib.contextmanager
def with_plan(server: Running) -> Iterator[Path]:
    """Put a plan of the server's capture into its folder, as a run does; yield the folder."""
    root = server.endpoint.root
    plan = dataclasses.replace(plan_with([], capture_folder="tiny"), capture=server.spec)
    plan.publish(Results(root).plan)
    try:
        yield root
    finally:
        Results(root).plan.unlink()


def verdicts(found: Examination) -> dict[str, tuple[str, str]]:
    return {each.subject: (each.verdict, each.certainty) for each in found.findings}


def test_our_server_is_harmless_by_its_receipts(server: Running) -> None:
    before = sorted(server.endpoint.root.iterdir())
    with with_plan(server) as root:
        found = examine(server.endpoint.url, api_key=None, results=root)
    assert found.counted == "receipts"
    assert set(verdicts(found).values()) == {("harmless", "measured")}
    (long,) = [each for each in found.seen if each.name == "longer than a chunk"]
    assert (long.sent, long.rows, long.chunks) == (320, 320, 2)
    assert sorted(server.endpoint.root.iterdir()) == before


def test_without_receipts_cached_tokens_and_flags_tell(server: Running) -> None:
    found = examine(server.endpoint.url, api_key=None, results=None)
    assert found.counted == ""
    assert verdicts(found) == {
        "a prompt of its own": ("harmless", "cached tokens"),
        "radix cache": ("harmless", "cached tokens"),
        "chunked prefill": ("corrupts", "flags"),
        "warm-up": ("harmless", "cached tokens"),
    }


def test_a_server_with_the_radix_cache_is_found_out(shared_server: Running) -> None:
    with with_plan(shared_server) as root:
        found = examine(shared_server.endpoint.url, api_key=None, results=root)
    seen = {each.name: each for each in found.seen}
    assert (seen["the same again"].cached, seen["the same again"].rows) == (63, 1)
    assert (seen["shares a prefix"].cached, seen["shares a prefix"].rows) == (32, 32)
    assert seen["a fresh extra_key"].rows == 64
    # the warm-up's three ids, unless a later request has taken their place in the cache
    assert seen["begins like the warm-up"].cached in (0, 3)
    measured = verdicts(found)
    assert measured["radix cache"] == ("corrupts", "measured")
    assert measured["extra_key"] == ("harmless", "measured")
    assert measured["chunked prefill"] == ("harmless", "measured")
