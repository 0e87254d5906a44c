"""An asynchronous client of the instrumented server: one request a sample, as many tokens in flight as allowed.

Samples go longest first, and prefixes in the middle of them: what is short and arrives alone, before the others or after them, makes a
prefill pass of its own.
"""

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import numpy as np

from draftstates import ids, wire
from draftstates.errors import UserError

_RECEIPT_POLL_SECONDS = 0.005
_SYNC_DEADLINE_SECONDS = 600.0  # after the last receipt; write-back began with the first row
_RECEIPT_DEADLINE_SECONDS = 120.0  # after the answer; the rows are then at most one queue away from their file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One sample to capture, or a prefix of one.

    Attributes:
        input_ids: int32 [n]; their states go to rows first_row:first_row+n of `shard`, a laid-out file below the server's root.
    """

    sample_id: str
    shard: Path
    first_row: int
    input_ids: np.ndarray
    kind: str = wire.PLAIN
    prefix: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured:
    """A sample that the server captured whole.

    Attributes:
        top: the 5 most likely next tokens, [token id, log probability] each, by the server's own logits.
        prehook: for a probe, by layer: largest distance of a captured row from what the entry hook saw, over the row's norm.
    """

    work: Work
    receipt: wire.Receipt
    prompt_tokens: int
    top: list[list[float]]
    attempts: int
    prehook: dict[str, float] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server's address, and the folder below which it writes, as this machine names it."""

    url: str
    api_key: str | None
    root: Path
    fresh_namespace: bool = False  # send an extra_key of its own with each attempt: needed where the radix cache is on


class CaptureFailed(Exception):
    """One attempt at one sample failed; the message says what was expected and what was found."""


class NoReceipt(CaptureFailed):
    """The server answered, but wrote no receipt in time: its disk is full, or the file is not the one that we read."""


class Client:
    """Sends work to one server and gives back what it captured."""

    def __init__(self, endpoint: Endpoint, *, tokens_in_flight: int, request_seconds: float = 1800.0) -> None:
        self._endpoint = endpoint
        self._limit = tokens_in_flight
        self._in_flight = 0
        self._room = asyncio.Condition()
        self._seconds = request_seconds
        self._receipts: dict[Path, tuple[wire.ReceiptReader, dict[str, wire.Receipt]]] = {}

    async def __aenter__(self) -> "Client":
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"} if self._endpoint.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=self._seconds), headers=headers
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def capture_all(
        self, work: Sequence[Work], *, retries: int, progress: Callable[[int], None] = lambda tokens: None
    ) -> tuple[list[Captured], dict[int, str]]:
        """Capture everything; what failed is tried again alone, one after the other. It ends early where samples wait in vain for receipts.

        Returns:
            what was captured, in the order of `work`, and the reasons of what was not, by position in `work`.
        """
        done: dict[int, Captured] = {}
        reasons: dict[int, str] = {}
        in_vain = asyncio.Event()

        async def attempt(position: int, number: int) -> None:
            try:
                done[position] = await self._capture(work[position], number)
                reasons.pop(position, None)
                progress(len(work[position].input_ids))
            except CaptureFailed as failure:
                reasons[position] = str(failure)
                if isinstance(failure, NoReceipt):
                    in_vain.set()

        async def first_attempt(position: int) -> None:
            try:
                await attempt(position, 1)
            finally:
                await self._leave(len(work[position].input_ids))

        async with asyncio.TaskGroup() as tasks:
            for position in _order(work):
                await self._enter(len(work[position].input_ids))
                if in_vain.is_set():
                    reasons[position] = "not sent, since others waited in vain for their receipts"
                    await self._leave(len(work[position].input_ids))
                else:
                    tasks.create_task(first_attempt(position))
        for number in range(2, retries + 2):
            for position in sorted(reasons):
                in_vain.clear()
                await attempt(position, number)
                if in_vain.is_set():  # the others would wait as long, each by itself
                    return [done[i] for i in sorted(done)], reasons
        return [done[i] for i in sorted(done)], reasons

    async def _enter(self, tokens: int) -> None:
        async with self._room:
            # a sample longer than the whole limit goes alone
            await self._room.wait_for(lambda: self._in_flight == 0 or self._in_flight + tokens <= self._limit)
            self._in_flight += tokens

    async def _leave(self, tokens: int) -> None:
        async with self._room:
            self._in_flight -= tokens
            self._room.notify_all()

    async def _capture(self, work: Work, number: int) -> Captured:
        rows = len(work.input_ids)
        destination = wire.Destination(
            file=str(work.shard.relative_to(self._endpoint.root)),
            first_row=work.first_row,
            rows=rows,
            ids_hash=ids.ids_hash(work.input_ids),
            attempt=uuid.uuid4().hex,
            kind=work.kind,
        )
        meta = await self._generate(work, destination)
        answer = _answer(meta)
        if meta["prompt_tokens"] != rows:
            raise CaptureFailed(f"{rows} tokens sent, the server counted {meta['prompt_tokens']}")
        receipt = await self._receipt(work.shard, destination)
        _check_receipt(receipt, destination, cached_tokens=meta["cached_tokens"])
        return Captured(
            work=work,
            receipt=receipt,
            prompt_tokens=meta["prompt_tokens"],
            top=[[token, logprob] for logprob, token, *_ in meta["output_top_logprobs"][0]],
            attempts=number,
            prehook=answer.get("prehook"),
        )

    async def _generate(self, work: Work, destination: wire.Destination) -> dict:
        body = {
            "rid": destination.rid,
            "input_ids": work.input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": wire.TOP_TOKENS,
        }
        if self._endpoint.fresh_namespace:
            body["extra_key"] = destination.attempt
        try:
            async with self._session.post(f"{self._endpoint.url}/generate", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise CaptureFailed(f"the server answered {response.status}: {text[:500]}")
                return json.loads(text)["meta_info"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise CaptureFailed(f"no answer from {self._endpoint.url}: {type(error).__name__}: {error}") from error

    async def _receipt(self, shard: Path, destination: wire.Destination) -> wire.Receipt:
        deadline = time.monotonic() + _RECEIPT_DEADLINE_SECONDS
        while True:
            try:
                found = self._look(shard)
            except UserError as error:
                raise CaptureFailed(str(error)) from error
            if destination.rid in found:
                return found.pop(destination.rid)
            if time.monotonic() > deadline:
                raise NoReceipt(f"answered, but no receipt after {_RECEIPT_DEADLINE_SECONDS:.0f} s in {wire.receipts_path(shard)}")
            await asyncio.sleep(_RECEIPT_POLL_SECONDS)

    def _look(self, shard: Path) -> dict[str, wire.Receipt]:
        reader, found = self._receipts.setdefault(shard, (wire.ReceiptReader(wire.receipts_path(shard)), {}))
        found.update({receipt.rid: receipt for receipt in reader.new()})
        return found

    async def synced(self, shard: Path, *, rows: int) -> None:
        """Wait until the server has said that all rows of `shard` are on the disk.

        Raises:
            UserError: it did not say so in time.
        """
        deadline = time.monotonic() + _SYNC_DEADLINE_SECONDS
        while True:
            self._look(shard)
            if self._receipts[shard][0].synced_rows == rows:
                return
            if time.monotonic() > deadline:
                raise UserError(f"{shard}: the server did not report its {rows} rows as synced within {_SYNC_DEADLINE_SECONDS:.0f} s")
            await asyncio.sleep(_RECEIPT_POLL_SECONDS)


def _order(work: Sequence[Work]) -> list[int]:
    """Positions in the order in which they are sent."""
    longest_first = sorted(range(len(work)), key=lambda i: -len(work[i].input_ids))
    samples = [i for i in longest_first if not work[i].prefix]
    half = (len(samples) + 1) // 2
    return samples[:half] + [i for i in longest_first if work[i].prefix] + samples[half:]


def _answer(meta: dict) -> dict:
    """The plug-in's own word in the answer."""
    values = meta.get(wire.ANSWER_KEY)
    answer = json.loads(values[-1]) if values else {}
    if "plugin" not in answer:
        raise CaptureFailed("the server answered without capturing: it was started without the draftstates plug-in or its settings")
    if "error" in answer:
        raise CaptureFailed(answer["error"])
    return answer


def _check_receipt(receipt: wire.Receipt, destination: wire.Destination, *, cached_tokens: int) -> None:
    """Promise 2: tokens sent = prompt tokens = rows written, nothing from a cache; and the rows are those of these ids."""
    if receipt.rows != destination.rows:
        why = f"{cached_tokens} came from a cache" if cached_tokens else receipt.error or "the rest never came"
        raise CaptureFailed(f"{receipt.rows} of {destination.rows} rows captured: {why}")
    if receipt.error:
        raise CaptureFailed(receipt.error)
    if receipt.cached_tokens or cached_tokens:
        raise CaptureFailed(f"{max(receipt.cached_tokens, cached_tokens)} tokens came from a cache, expected 0")
    if receipt.ids_hash != destination.ids_hash:
        raise CaptureFailed(f"the rows are those of other ids: sent {destination.ids_hash}, forwarded {receipt.ids_hash}")
