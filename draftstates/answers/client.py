"""Asynchronous client of a server that answers: one request for each turn, ids in and ids out."""

import asyncio
import json
import math
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np

from draftstates.answers.chat import Reply
from draftstates.config import Sampling
from draftstates.errors import UserError
from draftstates.tokens.answered import LENGTH

# an answer that takes longer, and then a second for each token, is given up, as in extract/client
_REQUEST_SECONDS = 1800.0
_CONNECT_SECONDS = 30.0
# ids are stored as int32
_IDS = 2**31
# waits before the second and the third attempt at a request
_WAITS = (1.0, 5.0)


class NoAnswer(UserError):
    """The error for a request that the server did not answer as it must."""


class AnswerClient:
    """Client that sends prompts to one server.

    Attributes:
        parameters: sampling parameters of every request, but for what ends an answer.
    """

    def __init__(self, url: str, *, api_key: str | None, sampling: Sampling) -> None:
        """Keep what all requests have in common.

        Args:
            url: the server's address.
            api_key: its key, if it has one.
            sampling: how tokens are drawn.
        """
        self._url, self._key = url, api_key
        self.parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
        }

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def answer(self, prompt: np.ndarray, *, room: int, stop_ids: list[int]) -> Reply:
        """Return the answer to a prompt; try again where the server does not give one.

        Args:
            prompt: ids to send, int32 [T].
            room: most tokens of the answer.
            stop_ids: tokens that end it.

        Raises:
            NoAnswer: the server did not answer, or not as it must, in three attempts.
        """
        for wait in _WAITS:
            try:
                return await self._send(prompt, room, stop_ids)
            except NoAnswer:
                await asyncio.sleep(wait)
        return await self._send(prompt, room, stop_ids)

    async def _send(self, prompt: np.ndarray, room: int, stop_ids: list[int]) -> Reply:
        ends = {"max_new_tokens": room, "stop_token_ids": stop_ids}
        body = {
            "input_ids": prompt.tolist(),
            "sampling_params": {**self.parameters, **ends},
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        # the node of a server may lose its power, and then nobody closes the connection
        limits = aiohttp.ClientTimeout(total=_REQUEST_SECONDS + room, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.post(
                f"{self._url}/generate", json=body, timeout=limits
            ) as response:
                content = await response.read()
                if response.status != 200:
                    text = content[:500].decode(errors="replace")
                    raise NoAnswer(f"the server answered {response.status}: {text}")
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(
                f"no answer from {self._url}: {type(error).__name__}: {error}"
            ) from error
        return read_reply(content, sent=len(prompt), room=room, stop_ids=stop_ids)


def read_reply(content: bytes, *, sent: int, room: int, stop_ids: list[int]) -> Reply:
    """Return what the server sampled.

    Args:
        content: the body of its answer.
        sent: tokens of the prompt.
        room: most tokens of the answer.
        stop_ids: tokens that end an answer.

    Raises:
        NoAnswer: the body lacks a part, its parts disagree, or the request was aborted.
    """
    try:
        found = json.loads(content)
        meta, output = found["meta_info"], found["output_ids"]
        reason = {"matched": None, **meta["finish_reason"]}
        finish, matched = reason["type"], reason["matched"]
        logprobs = [float(value) for value, *_ in meta["output_token_logprobs"]]
        named = [token for _, token, *_ in meta["output_token_logprobs"]]
        prompt, cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
        if not all(type(token) is int and 0 <= token < _IDS for token in [*output]):
            raise ValueError("output_ids are no ids")
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise NoAnswer(
            f"the server's answer: expected output_ids, finish_reason and output_token_logprobs,"
            f" found {content[:200]!r} ({type(error).__name__}: {error})"
        ) from error
    last = named[-1] if named else None
    if finish == LENGTH and len(output) == room and last in stop_ids:
        # its last possible token ended it; the next prompt would get a second end token
        finish = "stop"
    expected: dict[str, Any] = {
        "finish_reason": f"stop or {LENGTH}",
        "ids of output_token_logprobs": output,
        "log probabilities": "finite and at most 0",
        "prompt_tokens": sent,
        "cached_tokens": f"0 to {sent}",
        "tokens": f"1 to {room}, and {room} where the answer is cut",
        "last token": f"one of {stop_ids} where the answer is not cut, as matched says",
    }
    seen = {
        "finish_reason": finish in ("stop", LENGTH),
        "ids of output_token_logprobs": named == output,
        # the logarithm of a sum that rounding made larger than 1
        "log probabilities": all(math.isfinite(each) and each < 1e-3 for each in logprobs),
        "prompt_tokens": prompt == sent,
        "cached_tokens": 0 <= cached <= sent,
        "tokens": 1 <= len(output) <= room and (finish != LENGTH or len(output) == room),
        # SGLang puts an end token in the place of one that it could not sample (`NaN happened`)
        "last token": finish == LENGTH or (last in stop_ids and matched in (None, last)),
    }
    for name, is_right in seen.items():
        if not is_right:
            raise NoAnswer(
                f"the server's answer: expected {name} {expected[name]}, found finish_reason"
                f" {finish} ({matched}), {prompt} prompt tokens, {cached} cached,"
                f" {len(output)} tokens, at the end {named[-8:]}"
            )
    return Reply(output, logprobs, finish, cached)
