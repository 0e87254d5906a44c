"""Examination of a running SGLang server: would a capture there lose rows without an error?

A few prompts are sent. Whether each token of a prompt gives its row is counted in the plug-in's
receipts, or in the states that the server returns. Where neither is to be had, the cached tokens
tell: a cached token is not computed, so that a capture never sees it.
"""

import contextlib
import dataclasses
import random
import uuid
from pathlib import Path
from typing import Any, Literal

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.report.doctor_requests import Asker, Prompt, Seen, laid_out
from draftstates.server.address import server_info

Verdict = Literal["harmless", "corrupts", "unknown"]
# measured: rows were counted. cached tokens: rows follow from what the server says it computed.
# flags: nothing was measured. none: not even the flags tell.
Certainty = Literal["measured", "cached tokens", "flags", "none"]
_SHORT, _PAGES = 64, 4
_BEYOND_A_CHUNK = 32
_WITHOUT_CHUNKS = 1024
# What SGLang sends itself when it starts: ids without a tokenizer, else this text.
_WARM_UP_IDS = [10, 11, 12]
_WARM_UP_TEXT = "The capital city of France is"
_FIRST_ID, _COMMON_IDS = 16, 1000
_NO_RADIX = "start the server with --disable-radix-cache"
_OWN_KEY = "give every request an extra_key of its own"
_WHOLE_PREFILL = (
    "start the server with --chunked-prefill-size -1, and with --max-prefill-tokens no shorter than"
    " the longest sample; or capture with the plug-in, which writes the rows of every chunk"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What one property of the server does to a capture there."""

    subject: str
    verdict: Verdict
    certainty: Certainty
    why: str
    change: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """An examined server; `counted` is a key of `doctor_requests.COUNTED`."""

    url: str
    engine: str
    model: str
    counted: str
    seen: list[Seen]
    findings: list[Finding]


def examine(url: str, *, api_key: str | None, results: Path | None) -> Examination:
    """Send the prompts to a server and judge what comes back.

    Args:
        url: base URL of the server, without a trailing slash.
        api_key: the key that the server asks for.
        results: results folder that the server captures below, for the plug-in's receipts; None
            for a server of another kind.

    Raises:
        UserError: no SGLang server answers there, or it refuses a plain request.
    """
    info = server_info(url, api_key=api_key)
    prompts = make_prompts(info, random.SystemRandom())
    with laid_out(results, prompts) as receipts:
        asker = Asker(url, api_key, receipts)
        seen = [asker.ask(prompt) for prompt in prompts]
    return Examination(
        url=url,
        engine=f"SGLang {info['version']}",
        model=str(info.get("served_model_name") or info.get("model_path") or "a model"),
        counted=asker.counted,
        seen=seen,
        findings=judge({each.name: each for each in seen}, info),
    )


def make_prompts(info: dict[str, Any], rng: random.Random) -> list[Prompt]:
    """Return the prompts in the order of sending, made for a server's flags.

    Args:
        info: the server's own arguments.
        rng: where unique ids come from.
    """
    length = max(_SHORT, _PAGES * _number(info, "page_size", 1))
    chunk = _number(info, "chunked_prefill_size", -1)
    longest = _number(info, "max_req_input_len", 0) or _number(info, "context_length", 0)
    long = chunk + max(_BEYOND_A_CHUNK, chunk // 4) if chunk > 0 else _WITHOUT_CHUNKS
    if longest:
        long = min(long, longest - 2)
    last = _last_id(info)
    ranks = max(_number(info, "dp_size", 1), _number(info, "attn_dp_size", 1))

    # no two prompts begin with the same token by chance
    firsts = rng.sample(range(_FIRST_ID, last), 5)

    def fresh(count: int) -> list[int]:
        return [firsts.pop(), *(rng.randrange(_FIRST_ID, last) for _ in range(count - 1))]

    unique = fresh(length)
    if info.get("skip_tokenizer_init"):
        warm_up = Prompt(name="begins like the warm-up", input_ids=_WARM_UP_IDS + fresh(length))
    else:
        text = f"{_WARM_UP_TEXT} {rng.getrandbits(64):x}"
        warm_up = Prompt(name="begins like the warm-up", input_ids=[], text=text)
    return [
        warm_up,
        Prompt(name="of its own", input_ids=unique),
        # data parallel ranks take turns: then one of them has seen it before, and all have seen it
        Prompt(name="the same again", input_ids=unique, times=ranks),
        Prompt(
            name="shares a prefix", input_ids=unique[: length // 2] + fresh(length - length // 2)
        ),
        Prompt(name="longer than a chunk", input_ids=fresh(long)),
        Prompt(name="a fresh extra_key", input_ids=unique, extra_key=uuid.uuid4().hex),
    ]


def _number(info: dict[str, Any], name: str, default: int) -> int:
    found = info.get(name)
    return found if type(found) is int else default


def _last_id(info: dict[str, Any]) -> int:
    """Return the end of the range of ids to draw from: of the model's own, where it is here."""
    with contextlib.suppress(UserError, OSError, TypeError, KeyError):
        return ModelFolder(Path(info["model_path"])).vocab_size
    return _COMMON_IDS


def judge(seen: dict[str, Seen], info: dict[str, Any]) -> list[Finding]:
    """Return what the radix cache, an `extra_key`, chunks and the warm-up do to a capture.

    Args:
        seen: what came back, by the name of the prompt.
        info: the server's own arguments.
    """
    unique = seen["of its own"]
    plain = _plain(unique)
    if unique.rows is not None and unique.sent - unique.rows > (unique.cached or 0):
        why = "Rows are missing even without it, so that its own effect cannot be told."
        others = ("radix cache", "chunked prefill", "warm-up")
        return [
            plain,
            *(Finding(subject=s, verdict="unknown", certainty="none", why=why) for s in others),
        ]
    again, shared = seen["the same again"], seen["shares a prefix"]
    fresh = seen["a fresh extra_key"]
    cache = _radix_cache(again, shared, fresh, info)
    found = [cache]
    if cache.verdict == "corrupts":
        found.append(_extra_key(fresh))
    return [
        plain,
        *found,
        _chunks(seen["longer than a chunk"], info),
        _warm_up(seen["begins like the warm-up"], cache, info),
    ]


def _certainty(seen: Seen) -> Certainty:
    return "measured" if seen.rows is not None else "cached tokens"


def _plain(unique: Seen) -> Finding:
    subject = "a prompt of its own"
    if unique.lost is None:
        why = "The server reports neither rows nor cached tokens."
        return Finding(subject=subject, verdict="unknown", certainty="none", why=why)
    if unique.lost:
        why = f"Of {unique.sent} tokens that nobody has sent before, {_came(unique)}."
        return Finding(
            subject=subject,
            verdict="corrupts",
            certainty=_certainty(unique),
            why=why,
            change="find out what else keeps rows back: no capture there is whole",
        )
    gave = "every row" if unique.rows is not None else "no cached token"
    why = f"{unique.sent} tokens that nobody has sent before gave {gave}."
    return Finding(subject=subject, verdict="harmless", certainty=_certainty(unique), why=why)


def _radix_cache(again: Seen, shared: Seen, fresh: Seen, info: dict[str, Any]) -> Finding:
    subject = "radix cache"
    worst = max((again, shared), key=lambda each: (each.lost or 0) / each.sent)
    if worst.lost is None:
        off = info.get("disable_radix_cache")
        if off is None:
            why = "The server says neither what it takes from its cache nor whether it has one."
            return Finding(
                subject=subject, verdict="unknown", certainty="none", why=why, change=_NO_RADIX
            )
        why = (
            f"The server does not report cached tokens; its flags say that the cache is {_on(off)}."
        )
        return Finding(
            subject=subject,
            verdict="harmless" if off else "corrupts",
            certainty="flags",
            why=why,
            change=None if off else f"{_NO_RADIX}, or {_OWN_KEY}",
        )
    if worst.lost:
        why = (
            f"Of {again.sent} tokens sent a second time, {_came(again)}; of {shared.sent} tokens"
            f" whose first {shared.sent // 2} were sent before, {_came(shared)}. The missing rows"
            " belong to tokens that the cache held, so that the server did not compute them."
        )
        works = not fresh.lost
        change = f"{_NO_RADIX}, or {_OWN_KEY}" if works else _NO_RADIX
        return Finding(
            subject=subject,
            verdict="corrupts",
            certainty=_certainty(worst),
            why=why,
            change=change,
        )
    why = (
        f"{again.sent} tokens sent twice, and {shared.sent} tokens that share a prefix with them,"
        f" gave {'every row' if worst.rows is not None else 'no cached token'}."
    )
    return Finding(subject=subject, verdict="harmless", certainty=_certainty(worst), why=why)


def _on(off: object) -> str:
    return "off" if off else "on"


def _came(seen: Seen) -> str:
    """Return how many rows came back of a prompt, in words."""
    if seen.rows is None:
        return f"{seen.cached} came from the cache"
    return f"{seen.rows} rows came back" + (f" ({seen.cached} cached)" if seen.cached else "")


def _extra_key(fresh: Seen) -> Finding:
    if fresh.lost:
        why = f"Even with an extra_key of its own, of {fresh.sent} known tokens {_came(fresh)}."
        return Finding(
            subject="extra_key",
            verdict="corrupts",
            certainty=_certainty(fresh),
            why=why,
            change=f"{_NO_RADIX}: this server does not separate its cache by extra_key",
        )
    why = (
        f"With an extra_key of its own, the same {fresh.sent} tokens were computed again,"
        f" {'every row' if fresh.rows is not None else 'none of them cached'}: a capture that sends"
        " a fresh one with each request is whole."
    )
    return Finding(subject="extra_key", verdict="harmless", certainty=_certainty(fresh), why=why)


def _chunks(long: Seen, info: dict[str, Any]) -> Finding:
    subject, chunk = "chunked prefill", info.get("chunked_prefill_size")
    beyond = type(chunk) is int and 0 < chunk < long.sent
    if long.rows is not None and long.rows + (long.cached or 0) < long.sent:
        why = (
            f"Of {long.sent:,} new tokens, {long.rows:,} rows came back: those of the last chunk"
            f" (chunks have {chunk} tokens)."
        )
        return Finding(
            subject=subject,
            verdict="corrupts",
            certainty="measured",
            why=why,
            change=_WHOLE_PREFILL,
        )
    if long.rows is not None and (beyond or chunk == -1 or long.chunks):
        chunks = f" in {long.chunks} chunks" if long.chunks else ""
        why = f"{long.sent:,} new tokens{chunks} gave {long.rows:,} rows."
        return Finding(subject=subject, verdict="harmless", certainty="measured", why=why)
    if type(chunk) is not int:
        why = "The server does not say whether it splits prompts, and gives back no states."
        return Finding(
            subject=subject, verdict="unknown", certainty="none", why=why, change=_WHOLE_PREFILL
        )
    if chunk <= 0:
        why = "The server's flags say that it splits no prompt; it gives back no states to count."
        return Finding(subject=subject, verdict="harmless", certainty="flags", why=why)
    why = (
        f"The server's flags say that it splits prompts into chunks of {chunk:,} tokens, and a"
        " shorter prompt too where others fill the chunk. SGLang's own return_hidden_states keeps"
        " the rows of the last chunk alone."
    )
    return Finding(
        subject=subject, verdict="corrupts", certainty="flags", why=why, change=_WHOLE_PREFILL
    )


def _warm_up(warm: Seen, cache: Finding, info: dict[str, Any]) -> Finding:
    subject = "warm-up"
    if warm.lost:
        why = (
            f"Of {warm.sent} tokens that begin like the server's own warm-up request,"
            f" {_came(warm)}: a sample that begins so loses its first rows, even if it is the first"
            " sample."
        )
        change = (
            f"{_NO_RADIX}, or {_OWN_KEY}; --skip-server-warmup, or POST /flush_cache after the"
            " start, removes this cause alone"
        )
        return Finding(
            subject=subject,
            verdict="corrupts",
            certainty=_certainty(warm),
            why=why,
            change=change,
        )
    if info.get("skip_server_warmup"):
        why = "The server was started without one."
        return Finding(subject=subject, verdict="harmless", certainty="flags", why=why)
    if warm.lost is None:
        why = f"The server does not report cached tokens; its radix cache: {cache.verdict}."
        return Finding(
            subject=subject,
            verdict=cache.verdict,
            certainty=cache.certainty,
            why=why,
            change=cache.change,
        )
    why = f"{warm.sent} tokens that begin like the server's own warm-up request lost no row."
    return Finding(subject=subject, verdict="harmless", certainty=_certainty(warm), why=why)
