"""Asynchronous client of the server: one request per sample, with a limit of tokens in flight.

Samples are sent longest first, and prefix recaptures in the middle of them. A short request that
arrives alone, before or after the others, would take a prefill pass of its own.

Where the server keeps a radix cache for it (`Endpoint.reuse_prefixes`), a sample that shares rows
is sent when the samples whose rows they are have been captured, in the namespace of their requests.
A namespace is the attempt of the first of them, so no other shard or attempt ever fills it. All
else is sent in a namespace of its own, in which nothing may be cached. A sample whose shared rows
are to be compared with the stored ones waits in the same way, with or without a cache.
"""

import asyncio
import dataclasses
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from draftstates import ids
from draftstates.errors import UserError
from draftstates.extract import protocol

_RECEIPT_POLL_SECONDS = 0.005
# Counted from the last receipt; write-back began with the first row.
_SYNC_DEADLINE_SECONDS = 600.0
# Counted from the answer; the rows are then at most one queue away from their file.
_RECEIPT_DEADLINE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One sample to capture, or a prefix of one.

    Attributes:
        shard: laid-out file below the server's root.
        first_row: first row of the written states in `shard`.
        input_ids: int32 [n]; their states take n rows, less the shared ones.
        shared: first rows of them that are an earlier sample's.
        owners: first rows in `shard` of the samples whose rows those are, the last one last.
        compared: whether shared rows that are computed again are compared with the shard's.
        prefix: whether it is a prefix recapture.
    """

    sample_id: str
    shard: Path
    first_row: int
    input_ids: np.ndarray
    kind: str = protocol.PLAIN
    prefix: bool = False
    shared: int = 0
    owners: tuple[int, ...] = ()
    compared: bool = False

    @property
    def rows(self) -> int:
        """Number of rows that are written."""
        return len(self.input_ids) - self.shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured:
    """A completely captured sample.

    Attributes:
        top: the 5 most likely next tokens, [token id, log probability] each, by the server's own
            logits; of a sample only.
        rows: of each row, such pairs of the 2 most likely next tokens and of the token that
            follows; of a prefix recapture only.
        opinions: by `r_k`, the largest distance of a captured row from a second reading, divided by
            the row's norm; only for a self-test request.
        no_capture: why SGLang gave no second reading of the layers; only for a self-test request.
        settings: the settings of the rank that wrote; only for a self-test request.
        weights: the mark of that rank's weights, if they were updated; as `settings`.
        server: the name that the server gave itself when it started.
        namespace: namespace of the server's radix cache; None where it has none.
    """

    work: Work
    receipt: protocol.Receipt
    prompt_tokens: int
    top: list[list[float]] | None
    rows: list[list[list[float]]] | None
    attempts: int
    opinions: dict[str, float] | None
    no_capture: str = ""
    settings: dict[str, dict[str, str]] | None = None
    weights: str | None = None
    server: str | None = None
    namespace: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address of a server.

    Attributes:
        root: folder below which the server writes, as this machine names it.
        server: the name of the server that passed the self-test; another that answers under the
            address was started since. None takes any.
        fresh_namespace: send an `extra_key` of its own with each attempt, which a server with a
            radix cache needs.
        reuse_prefixes: whether a sample's first rows may be computed from the keys and values that
            the requests of the samples left whose rows they are.
    """

    url: str
    api_key: str | None
    root: Path
    fresh_namespace: bool = False
    reuse_prefixes: bool = False
    server: str | None = None


class CaptureFailed(Exception):
    """Failure of one attempt at one sample; the message names expected and found values."""


class WaitedInVain(UserError):
    """The error for a server that answers, but does not say in time what it has written."""


class NoReceipt(CaptureFailed):
    """Answer without a receipt in time: the server's disk is full, or it writes another file."""


class Client:
    """Client that sends work to one server and collects the captured samples."""

    def __init__(
        self, endpoint: Endpoint, *, tokens_in_flight: int, request_seconds: float = 1800.0
    ) -> None:
        self._endpoint = endpoint
        self._limit = tokens_in_flight
        self._in_flight = 0
        self._room = asyncio.Condition()
        self._seconds = request_seconds
        self._receipts: dict[Path, tuple[protocol.ReceiptReader, dict[str, protocol.Receipt]]] = {}
        # whether an attempt was answered and its receipt did not come
        self.waited_in_vain = False

    async def __aenter__(self) -> "Client":
        headers = (
            {"Authorization": f"Bearer {self._endpoint.api_key}"} if self._endpoint.api_key else {}
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._seconds),
            headers=headers,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def capture(
        self,
        work: Sequence[Work],
        *,
        retries: int,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> tuple[list[Captured], dict[int, str]]:
        """Capture all work; try failed samples a second time alone, one after the other.

        The call ends early if samples wait in vain for receipts.

        Returns:
            the captured samples in the order of `work`, and the reasons of the failed ones by
            position in `work`.
        """
        done: dict[int, Captured] = {}
        reasons: dict[int, str] = {}
        in_vain = asyncio.Event()
        order = _Order(work, reuse=self._endpoint.reuse_prefixes)

        async def attempt(position: int, number: int) -> None:
            try:
                order.check_compared(position, done)
                namespace = order.namespace(position, done) if number == 1 else None
                done[position] = await self._send(work[position], number, namespace)
                reasons.pop(position, None)
                progress(len(work[position].input_ids))
            except CaptureFailed as failure:
                reasons[position] = str(failure)
                if isinstance(failure, NoReceipt):
                    self.waited_in_vain = True
                    in_vain.set()
            finally:
                order.ended(position)
                await self._leave(len(work[position].input_ids))

        async with asyncio.TaskGroup() as tasks:
            for _ in work:
                position = await order.next()
                await self._enter(len(work[position].input_ids))
                if in_vain.is_set():
                    reasons[position] = (
                        "not sent, since other samples waited in vain for their receipts"
                    )
                    order.ended(position)
                    await self._leave(len(work[position].input_ids))
                else:
                    tasks.create_task(attempt(position, 1))
        for number in range(2, retries + 2):
            for position in sorted(reasons):
                in_vain.clear()
                await self._enter(len(work[position].input_ids))
                await attempt(position, number)
                # Each of the other samples would wait as long.
                if in_vain.is_set():
                    return [done[i] for i in sorted(done)], reasons
        return [done[i] for i in sorted(done)], reasons

    async def _enter(self, tokens: int) -> None:
        """Wait until so many more tokens may be under way."""
        async with self._room:
            # A sample longer than the whole limit is sent alone.
            await self._room.wait_for(
                lambda: self._in_flight == 0 or self._in_flight + tokens <= self._limit
            )
            self._in_flight += tokens

    async def _leave(self, tokens: int) -> None:
        async with self._room:
            self._in_flight -= tokens
            self._room.notify_all()

    async def _send(self, work: Work, number: int, namespace: str | None = None) -> Captured:
        """Send one sample, and wait for its receipt.

        Args:
            namespace: namespace in which the rows that it shares have been computed; None for one
                of its own.
        """
        rows = len(work.input_ids)
        destination = protocol.Destination(
            file=str(work.shard.relative_to(self._endpoint.root)),
            first_row=work.first_row,
            rows=rows,
            shared=work.shared,
            ids_hash=ids.ids_hash(work.input_ids),
            attempt=uuid.uuid4().hex,
            kind=protocol.COMPARING if namespace or work.compared else work.kind,
        )
        most_cached = work.shared if namespace else 0
        if namespace is None and self._endpoint.fresh_namespace:
            namespace = destination.attempt
        meta = await self._generate(work, destination, namespace)
        prompt_tokens, cached_tokens = _count(meta, "prompt_tokens"), _count(meta, "cached_tokens")
        try:
            answer = _answer(meta)
        except CaptureFailed as error:
            if cached_tokens <= most_cached:
                raise
            # The plug-in cannot say why it never saw these rows.
            computed = f"{rows - cached_tokens} of {rows} rows captured"
            raise CaptureFailed(f"{computed}: {cached_tokens} came from a cache") from error
        server = _optional(answer, "server", str)
        _check_server(server, tested=self._endpoint.server)
        if prompt_tokens != rows:
            raise CaptureFailed(f"{rows} tokens sent, the server counted {prompt_tokens}")
        top = None if work.prefix else _top_tokens(meta)
        nexts = _tokens_of_rows(meta, work.input_ids) if work.prefix else None
        receipt = await self._receipt(work.shard, destination)
        _check_counts(
            receipt, destination, work, cached_tokens=cached_tokens, most_cached=most_cached
        )
        return Captured(
            work=work,
            receipt=receipt,
            prompt_tokens=prompt_tokens,
            top=top,
            rows=nexts,
            attempts=number,
            opinions=_distances(answer),
            no_capture=_optional(answer, "no_capture", str) or "",
            settings=_optional(answer, "settings", dict),
            weights=_optional(answer, "weights", str),
            server=server,
            namespace=namespace,
        )

    async def _generate(
        self, work: Work, destination: protocol.Destination, namespace: str | None
    ) -> dict:
        """Send the request; return `meta_info` of the answer."""
        body = {
            "rid": destination.rid,
            "input_ids": work.input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            # Of a prefix recapture, the next tokens of every row.
            "logprob_start_len": 0 if work.prefix else -1,
            "top_logprobs_num": protocol.ROW_TOKENS if work.prefix else protocol.TOP_TOKENS,
        }
        if namespace:
            body["extra_key"] = namespace
        try:
            async with self._session.post(f"{self._endpoint.url}/generate", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise CaptureFailed(f"the server answered {response.status}: {text[:500]}")
                return _meta_info(text)
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            raise CaptureFailed(
                f"no answer from {self._endpoint.url}: {type(error).__name__}: {error}"
            ) from error

    async def _receipt(self, shard: Path, destination: protocol.Destination) -> protocol.Receipt:
        """Wait for the receipt of one request."""
        deadline = time.monotonic() + _RECEIPT_DEADLINE_SECONDS
        while True:
            try:
                found = self._look(shard)
            except UserError as error:
                raise CaptureFailed(str(error)) from error
            if destination.rid in found:
                return found.pop(destination.rid)
            if time.monotonic() > deadline:
                raise NoReceipt(
                    f"answered, but no receipt after {_RECEIPT_DEADLINE_SECONDS:.0f} s in"
                    f" {protocol.growing_receipts(shard)}"
                )
            await asyncio.sleep(_RECEIPT_POLL_SECONDS)

    def _look(self, shard: Path) -> dict[str, protocol.Receipt]:
        """Read new receipts of a shard; return those that nobody has taken yet."""
        reader, found = self._receipts.setdefault(
            shard, (protocol.ReceiptReader(protocol.growing_receipts(shard)), {})
        )
        found.update({receipt.rid: receipt for receipt in reader.new()})
        return found

    async def synced(self, shard: Path, *, rows: int) -> None:
        """Wait until the server has reported that all rows of `shard` are on the disk.

        Raises:
            WaitedInVain: the server did not report it in time.
        """
        deadline = time.monotonic() + _SYNC_DEADLINE_SECONDS
        while True:
            self._look(shard)
            if self._receipts[shard][0].synced_rows == rows:
                return
            if time.monotonic() > deadline:
                raise WaitedInVain(
                    f"{shard}: the server did not report its {rows} rows as synced within"
                    f" {_SYNC_DEADLINE_SECONDS:.0f} s"
                )
            await asyncio.sleep(_RECEIPT_POLL_SECONDS)


class _Order:
    """The order of sending: a sample follows those whose rows it reuses, or is compared with.

    Of the samples that may be sent, those that have waited come first, since what they reuse may be
    evicted, and then those that a sample which is compared waits for, so that it is not the last.

    Args:
        work: all that is sent.
        reuse: whether shared rows are computed once.
    """

    def __init__(self, work: Sequence[Work], *, reuse: bool) -> None:
        sent = {(item.shard, item.first_row): position for position, item in enumerate(work)}
        # by position, the samples that one waits for; what was copied into the shard is not sent
        self._owners: dict[int, list[int]] = {}
        self._reusing, self._compared = set(), set()
        for position, item in enumerate(work):
            owners = [sent[key] for row in item.owners if (key := (item.shard, row)) in sent]
            # of copied rows, nothing is cached
            if reuse and owners and len(owners) == len(item.owners):
                self._reusing.add(position)
            if item.compared:
                self._compared.add(position)
            if position in self._reusing or item.compared:
                self._owners[position] = owners
        self._left = {position: {*owners} for position, owners in self._owners.items() if owners}
        self._children: dict[int, list[int]] = {}
        for position, owners in self._left.items():
            for owner in owners:
                self._children.setdefault(owner, []).append(position)
        awaited = {i for each in self._compared - self._reusing for i in self._owners[each]}
        self._rank = {
            position: (position not in self._left, position not in awaited, rank)
            for rank, position in enumerate(_order(work))
        }
        self._ready: asyncio.PriorityQueue[tuple[tuple, int]] = asyncio.PriorityQueue()
        for position in self._rank.keys() - self._left:
            self._ready.put_nowait((self._rank[position], position))

    async def next(self) -> int:
        """Return the position of the work to send next; wait until there is one."""
        return (await self._ready.get())[-1]

    def ended(self, position: int) -> None:
        """Let the samples follow that waited for this one, be it captured or not."""
        for child in self._children.pop(position, []):
            self._left[child].discard(position)
            if not self._left[child]:
                self._ready.put_nowait((self._rank[child], child))

    def namespace(self, position: int, done: Mapping[int, Captured]) -> str | None:
        """Return the namespace in which the rows that a sample shares were all computed.

        None if there is no such namespace, for example since one of the samples failed.
        """
        owners = self._owners[position] if position in self._reusing else ()
        names = {done[owner].namespace if owner in done else None for owner in owners}
        return names.pop() if len(names) == 1 else None

    def check_compared(self, position: int, done: Mapping[int, Captured]) -> None:
        """Refuse to send a sample that is compared with rows which are not in the file yet.

        The samples whose rows they are come before it, when the failed ones are tried again.
        """
        if position in self._compared and not done.keys() >= {*self._owners[position]}:
            raise CaptureFailed("not sent, since a sample whose rows it shares was not captured")


def _order(work: Sequence[Work]) -> list[int]:
    """Return positions in the order of sending."""
    longest_first = sorted(range(len(work)), key=lambda i: -len(work[i].input_ids))
    samples = [i for i in longest_first if not work[i].prefix]
    half = (len(samples) + 1) // 2
    return samples[:half] + [i for i in longest_first if work[i].prefix] + samples[half:]


def _meta_info(text: str) -> dict:
    """Return what an answer says about its request."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unexpected("JSON", text) from error
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise _unexpected("an object `meta_info`", answer)
    return meta


def _unexpected(expected: str, found: object) -> CaptureFailed:
    return CaptureFailed(f"the server's answer: expected {expected}, found {repr(found)[:200]}")


def _count(meta: dict, name: str) -> int:
    if type(found := meta.get(name)) is not int or found < 0:
        raise _unexpected(f"a number `{name}`", found)
    return found


def _top_tokens(meta: dict) -> list[list[float]]:
    """Return the most likely next tokens of an answer, [token id, log probability] each."""
    found = meta.get("output_top_logprobs")
    try:
        return _pairs(found[0], protocol.TOP_TOKENS)
    except (TypeError, ValueError, LookupError) as error:
        raise _unexpected(
            f"{protocol.TOP_TOKENS} tokens in `output_top_logprobs`", found
        ) from error


def _tokens_of_rows(meta: dict, input_ids: np.ndarray) -> list[list[list[float]]]:
    """Return each row's most likely next tokens and the token that follows it, as pairs."""
    names = ("input_token_logprobs", "output_token_logprobs")
    top_names = ("input_top_logprobs", "output_top_logprobs")
    try:
        # The first token follows no row.
        followers = [*meta[names[0]][1:], *meta[names[1]][:1]]
        best = [*meta[top_names[0]][1:], *meta[top_names[1]][:1]]
        rows = [
            [*_pairs(top, protocol.ROW_TOKENS), *_pairs([follower], 1)]
            for top, follower in zip(best, followers, strict=True)
        ]
    except (TypeError, ValueError, LookupError) as error:
        raise _unexpected(f"log probabilities of every row ({error})", sorted(meta)) from error
    sent = input_ids[1:].tolist()
    last = max(sent, default=0)
    for row, token in zip(rows, sent, strict=False):
        # SGLang names the last token of the vocabulary 0, with the right log probability.
        if (row[-1][0], token) == (0, last):
            row[-1][0] = last
    returned = [row[-1][0] for row in rows[:-1]]
    if len(rows) != len(input_ids) or returned != sent:
        raise _unexpected(f"log probabilities of the {len(sent)} tokens that were sent", returned)
    return rows


def _pairs(found: Any, count: int) -> list[list[float]]:
    """Return so many pairs of token id and log probability of an answer.

    Raises:
        TypeError, ValueError: they are others.
    """
    pairs = [[token, float(logprob)] for logprob, token, *_ in found]
    if len(pairs) != count or not all(
        type(token) is int and token >= 0 and math.isfinite(logprob) for token, logprob in pairs
    ):
        raise ValueError(f"expected {count} tokens with log probabilities, found {found!r:.80}")
    return pairs


def _distances(answer: dict) -> dict[str, float] | None:
    """Return how far the rows of a self-test request are from second readings."""
    found = _optional(answer, "opinions", dict)
    if found and not all(isinstance(value, int | float) for value in found.values()):
        raise _unexpected("numbers by layer in `opinions`", found)
    return found


def _optional(answer: dict, name: str, kind: type) -> Any:
    """Return a value of the plug-in's answer, which has this type or is missing."""
    found = answer.get(name)
    if found is not None and not isinstance(found, kind):
        raise _unexpected(f"{kind.__name__} in `{name}`", found)
    return found


def _answer(meta: dict) -> dict:
    """Return the plug-in's own part of the answer."""
    values = meta.get(protocol.ANSWER_KEY)
    try:
        answer = json.loads(values[-1]) if values else {}
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise _unexpected(f"JSON in `{protocol.ANSWER_KEY}`", values) from error
    if not isinstance(answer, dict):
        raise _unexpected(f"an object in `{protocol.ANSWER_KEY}`", values)
    if "plugin" not in answer:
        raise CaptureFailed(
            "the server answered without capturing: it was started without the draftstates plug-in"
            " or its settings"
        )
    if "error" in answer:
        raise CaptureFailed(str(answer["error"]))
    return answer


def _check_server(found: str | None, *, tested: str | None) -> None:
    """Refuse the answer of a server that was started after the self-test."""
    if tested is not None and found != tested:
        raise CaptureFailed(
            f"expected the server {tested}, which passed the self-test, found {found}: it was"
            " started again since; start the run again, which tests the new one first"
        )


def _check_counts(
    receipt: protocol.Receipt,
    destination: protocol.Destination,
    work: Work,
    *,
    cached_tokens: int,
    most_cached: int,
) -> None:
    """Compare a receipt with promise 2.

    Tokens sent = prompt tokens = rows written + rows shared, no more cached tokens than rows that
    were computed for an earlier sample in the same namespace, and rows of these ids. Of a comparing
    request, every shared row that was computed is compared.

    Args:
        cached_tokens: cached tokens by the server's answer.
        most_cached: cached tokens that there may be.
    """
    if receipt.rows != destination.written:
        why = (
            f"{cached_tokens} came from a cache"
            if cached_tokens
            else receipt.error or "the rest never came"
        )
        raise CaptureFailed(f"{receipt.rows} of {destination.written} rows captured: {why}")
    if receipt.error:
        raise CaptureFailed(receipt.error)
    if (most := max(receipt.cached_tokens, cached_tokens)) > most_cached:
        expected = f"at most {most_cached}" if most_cached else "0"
        raise CaptureFailed(f"{most} tokens came from a cache, expected {expected}")
    if receipt.cached_tokens != cached_tokens:
        raise CaptureFailed(
            f"{cached_tokens} tokens came from a cache, the receipt has {receipt.cached_tokens}"
        )
    comparing = destination.kind == protocol.COMPARING
    again = max(work.shared - cached_tokens, 0) if comparing else 0
    if receipt.again_rows != again:
        raise CaptureFailed(
            f"{receipt.again_rows} shared rows were compared with the file's, expected {again}"
        )
    sent = ids.ids_hash(work.input_ids[cached_tokens:])
    if receipt.ids_hash != sent:
        raise CaptureFailed(
            f"the rows are those of other ids: sent {sent}, forwarded {receipt.ids_hash}"
        )
