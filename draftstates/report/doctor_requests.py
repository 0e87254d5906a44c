"""Requests of an examination, and what came back: rows, cached tokens, chunks."""

import contextlib
import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstates import ids
from draftstates.errors import UserError
from draftstates.extract import protocol
from draftstates.extract.staging import building_folder, remove_empty
from draftstates.paths import Results
from draftstates.records import Plan
from draftstates.shards import layout

COUNTED = {
    "receipts": "rows counted in the plug-in's receipts",
    "return_hidden_states": "rows counted in the states that return_hidden_states gives back",
    "": "the server gives back no states: the verdicts follow from cached tokens and flags",
}
_REQUEST_SECONDS, _RECEIPT_SECONDS = 600.0, 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to send, and how often."""

    name: str
    input_ids: list[int]
    text: str | None = None
    extra_key: str | None = None
    times: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What came back for one prompt; of several answers, the one with the fewest rows.

    Attributes:
        sent: tokens of the prompt.
        cached: tokens that the server took from a cache; None if it does not say.
        rows: rows that came back; None if the server gives back none.
        chunks: prefill chunks, where receipts name them.
    """

    name: str
    sent: int
    cached: int | None
    rows: int | None
    chunks: int | None = None

    @property
    def lost(self) -> int | None:
        """Rows that are missing; None if neither rows nor cached tokens are known."""
        return self.cached if self.rows is None else self.sent - self.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipts:
    """A laid-out file below a server's results folder, with room for every prompt of ids."""

    file: str
    first_rows: dict[str, int]
    reader: protocol.ReceiptReader


@contextlib.contextmanager
def laid_out(results: Path | None, prompts: Sequence[Prompt]) -> Iterator[Receipts | None]:
    """Lay out a file for the plug-in's rows; remove it at the end."""
    if results is None:
        yield None
        return
    spec, root = Plan.read(Results(results).plan).capture, results.resolve()
    building = Results(root).selftest("doctor")
    with_ids = [prompt for prompt in prompts if prompt.text is None]
    lengths = [len(prompt.input_ids) for prompt in with_ids]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    with building_folder(building, "doctor") as folder:
        path = folder / "doctor.safetensors"
        layout.create(
            path,
            spec=spec,
            shard_id="doctor",
            sample_ids=[prompt.name for prompt in with_ids],
            lengths=lengths,
            input_ids=np.concatenate([prompt.input_ids for prompt in with_ids]).astype(np.int32),
            loss_mask=np.zeros(sum(lengths), np.uint8),
        )
        yield Receipts(
            file=str(path.relative_to(root)),
            first_rows={p.name: int(row) for p, row in zip(with_ids, starts, strict=False)},
            reader=protocol.ReceiptReader(protocol.growing_receipts(path)),
        )
    remove_empty(building.parent)
    remove_empty(Results(root).selftests)


class Asker:
    """Sender of prompts to one server, which finds out how rows can be counted there.

    Attributes:
        counted: what counts rows, a key of COUNTED.
    """

    def __init__(self, url: str, api_key: str | None, receipts: Receipts | None) -> None:
        self._url, self._receipts = url, receipts
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.counted = "receipts" if receipts else "return_hidden_states"

    def ask(self, prompt: Prompt) -> Seen:
        """Send a prompt as often as it says; return the answer with the fewest rows.

        Raises:
            UserError: the server refuses the request, or answers what SGLang does not.
        """
        answers = [self._ask_once(prompt) for _ in range(prompt.times)]
        return max(answers, key=lambda seen: seen.lost or 0)

    def _ask_once(self, prompt: Prompt) -> Seen:
        body: dict[str, Any] = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            **({"text": prompt.text} if prompt.text else {"input_ids": prompt.input_ids}),
            **({"extra_key": prompt.extra_key} if prompt.extra_key else {}),
        }
        rows = chunks = None
        if self._receipts and self.counted == "receipts" and prompt.text is None:
            destination = self._destination(self._receipts, prompt)
            meta = self._post({**body, "rid": destination.rid})
            if protocol.ANSWER_KEY in meta:
                receipt = self._receipt(self._receipts, destination, meta)
                rows, chunks = receipt.rows, receipt.chunks
            else:
                # this server has no plug-in: the next prompts are counted otherwise, or not at all
                self.counted = "return_hidden_states"
        elif self.counted == "return_hidden_states":
            meta = self._with_states(body)
            rows = _returned_rows(meta.get("hidden_states"))
        else:
            meta = self._post(body)
        sent = meta.get("prompt_tokens", len(prompt.input_ids))
        cached = meta.get("cached_tokens")
        if type(sent) is not int or not isinstance(cached, int | None):
            raise UserError(
                f"{self._url}: expected numbers `prompt_tokens` and `cached_tokens`, found {sent!r}"
                f" and {cached!r}"
            )
        return Seen(name=prompt.name, sent=sent, cached=cached, rows=rows, chunks=chunks)

    def _with_states(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for states too; a server that gives none refuses, and is asked without."""
        try:
            return self._post({**body, "return_hidden_states": True})
        except _Refused:
            self.counted = ""
            return self._post(body)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return `meta_info` of the answer to a request."""
        request = urllib.request.Request(  # noqa: S310
            f"{self._url}/generate", data=json.dumps(body).encode(), headers=self._headers
        )
        # a proxy of the environment does not lead to the server
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_REQUEST_SECONDS) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise _Refused(f"{self._url}: the server answered {error.code}: {text}") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            found = str(error) or type(error).__name__
            raise UserError(f"{self._url}: expected an answer of SGLang, found: {found}") from error
        meta = found.get("meta_info") if isinstance(found, dict) else None
        if not isinstance(meta, dict):
            raise UserError(
                f"{self._url}: expected an answer with `meta_info`, found {repr(found)[:200]}"
            )
        return meta

    @staticmethod
    def _destination(receipts: Receipts, prompt: Prompt) -> protocol.Destination:
        return protocol.Destination(
            file=receipts.file,
            first_row=receipts.first_rows[prompt.name],
            rows=len(prompt.input_ids),
            ids_hash=ids.ids_hash(np.array(prompt.input_ids, np.int32)),
            attempt=uuid.uuid4().hex,
        )

    def _receipt(
        self, receipts: Receipts, destination: protocol.Destination, meta: dict[str, Any]
    ) -> protocol.Receipt:
        """Wait for the receipt of an answered request."""
        with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
            if reason := json.loads(meta[protocol.ANSWER_KEY][-1]).get("error"):
                raise UserError(f"{self._url}: the plug-in refused: {reason}")
        deadline = time.monotonic() + _RECEIPT_SECONDS
        while time.monotonic() < deadline:
            for receipt in receipts.reader.new():
                if receipt.error:
                    raise UserError(f"{self._url}: the plug-in could not write: {receipt.error}")
                if receipt.rid == destination.rid:
                    return receipt
            time.sleep(0.02)
        raise UserError(
            f"{self._url}: the server answered, but no receipt came within {_RECEIPT_SECONDS:.0f} s"
            f" in {receipts.file}: name the results folder that this server captures below"
        )


class _Refused(UserError):
    """The error for a request that the server answered with an HTTP error."""


def _returned_rows(states: Any) -> int | None:
    """Return the number of rows of a prompt in what `return_hidden_states` gives back."""
    if not isinstance(states, list) or not states:
        return None
    # the first element is the prefill's, each further one that of a decoded token
    prefill = states[0]
    if not isinstance(prefill, list) or not prefill:
        return None
    return len(prefill) if isinstance(prefill[0], list) else 1
