"""The examination of a server names each way in which a capture there would lose rows."""

from pathlib import Path

import pytest
from stub_sglang import Stub, serving
from synthetic import plan_with

from draftstates.errors import UserError
from draftstates.report.doctor_requests import COUNTED
from draftstates.report.doctor_server import Examination, Finding, examine

PLAIN, CACHE, KEY, CHUNKS, WARM_UP = (
    "a prompt of its own",
    "radix cache",
    "extra_key",
    "chunked prefill",
    "warm-up",
)


def examined(stub: Stub) -> Examination:
    with serving(stub) as url:
        return examine(url, api_key=stub.key, results=stub.root)


def verdicts(found: Examination) -> dict[str, tuple[str, str]]:
    return {each.subject: (each.verdict, each.certainty) for each in found.findings}


def finding(found: Examination, subject: str) -> Finding:
    (only,) = [each for each in found.findings if each.subject == subject]
    return only


def test_a_server_without_cache_and_chunks_is_harmless() -> None:
    found = examined(Stub())
    assert found.counted == "return_hidden_states"
    assert verdicts(found) == dict.fromkeys(
        (PLAIN, CACHE, CHUNKS, WARM_UP), ("harmless", "measured")
    )
    assert all(each.rows == each.sent for each in found.seen)
    assert not any(each.change for each in found.findings)


@pytest.mark.parametrize("dp", [1, 3])
def test_the_radix_cache_loses_the_rows_of_known_tokens(dp: int) -> None:
    found = examined(Stub(radix=True, info={"dp_size": dp}))
    assert verdicts(found) == {
        PLAIN: ("harmless", "measured"),
        CACHE: ("corrupts", "measured"),
        KEY: ("harmless", "measured"),
        CHUNKS: ("harmless", "measured"),
        WARM_UP: ("harmless", "measured"),
    }
    cache = finding(found, CACHE)
    assert "Of 64 tokens sent a second time, 1 rows came back (63 cached)" in cache.why
    assert "--disable-radix-cache" in str(cache.change)
    assert "extra_key" in str(cache.change)


def test_an_extra_key_that_separates_nothing_is_no_remedy() -> None:
    found = examined(Stub(radix=True, namespaces=False))
    assert verdicts(found)[KEY] == ("corrupts", "measured")
    assert "extra_key" not in str(finding(found, CACHE).change)


def test_the_servers_own_warm_up_loses_the_first_rows_of_a_sample() -> None:
    found = examined(Stub(radix=True, warmed_up=True))
    warm_up = finding(found, WARM_UP)
    assert (warm_up.verdict, warm_up.certainty) == ("corrupts", "measured")
    assert "64 rows came back (3 cached)" in warm_up.why


def test_chunks_lose_all_rows_but_those_of_the_last() -> None:
    found = examined(Stub(chunk=256))
    chunks = finding(found, CHUNKS)
    assert (chunks.verdict, chunks.certainty) == ("corrupts", "measured")
    assert "Of 320 new tokens, 64 rows came back" in chunks.why
    assert verdicts(examined(Stub(chunk=256, keeps_chunks=True)))[CHUNKS] == (
        "harmless",
        "measured",
    )


def test_a_chunk_that_no_prompt_is_longer_than_is_judged_by_the_flags() -> None:
    found = examined(Stub(chunk=8192, info={"max_req_input_len": 512}))
    assert verdicts(found)[CHUNKS] == ("corrupts", "flags")
    assert max(each.sent for each in found.seen) == 510


def test_rows_that_no_cache_explains_are_named() -> None:
    found = verdicts(examined(Stub(drops=2)))
    assert found.pop(PLAIN) == ("corrupts", "measured")
    assert found == dict.fromkeys((CACHE, CHUNKS, WARM_UP), ("unknown", "none"))


def test_without_states_the_cached_tokens_and_flags_tell() -> None:
    found = examined(Stub(radix=True, states=False, chunk=256))
    assert COUNTED[found.counted].startswith("the server gives back no states")
    assert verdicts(found) == {
        PLAIN: ("harmless", "cached tokens"),
        CACHE: ("corrupts", "cached tokens"),
        KEY: ("harmless", "cached tokens"),
        CHUNKS: ("corrupts", "flags"),
        WARM_UP: ("harmless", "cached tokens"),
    }
    whole = examined(Stub(states=False, info={"skip_server_warmup": True}))
    assert verdicts(whole)[CHUNKS] == ("harmless", "flags")
    assert verdicts(whole)[WARM_UP] == ("harmless", "flags")


def test_a_server_that_says_nothing_is_unknown() -> None:
    silent = {"disable_radix_cache": None, "chunked_prefill_size": None}
    found = examined(Stub(states=False, says_cached=False, info=silent))
    assert verdicts(found) == dict.fromkeys((PLAIN, CACHE, CHUNKS, WARM_UP), ("unknown", "none"))
    by_flags = examined(Stub(radix=True, states=False, says_cached=False))
    assert verdicts(by_flags)[CACHE] == ("corrupts", "flags")


def test_the_plug_ins_receipts_count_the_rows(tmp_path: Path) -> None:
    plan_with([], capture_folder="tiny").publish(tmp_path / "plan.json")
    found = examined(Stub(radix=True, states=False, root=tmp_path, chunk=256, key="secret"))
    assert found.counted == "receipts"
    assert verdicts(found)[CACHE] == ("corrupts", "measured")
    assert verdicts(found)[CHUNKS] == ("harmless", "measured")
    assert "320 new tokens in 2 chunks gave 320 rows" in finding(found, CHUNKS).why
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_results_of_a_server_without_the_plug_in_count_nothing(tmp_path: Path) -> None:
    plan_with([], capture_folder="tiny").publish(tmp_path / "plan.json")
    with serving(Stub()) as url:
        found = examine(url, api_key=None, results=tmp_path)
    assert found.counted == "return_hidden_states"
    assert verdicts(found)[CACHE] == ("harmless", "measured")


def test_a_refusal_and_a_missing_server_are_named() -> None:
    stub = Stub(key="secret")
    with serving(stub) as url, pytest.raises(UserError, match="401"):
        examine(url, api_key=None, results=None)
    with pytest.raises(UserError, match="expected an SGLang server"):
        examine(url, api_key=None, results=None)
