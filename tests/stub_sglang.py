"""A stub of an SGLang server with a prefix cache and chunks, which lose rows as real ones do."""

import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftstates.extract import protocol


@dataclasses.dataclass
class Stub:
    """How the stub behaves.

    Attributes:
        states: whether `return_hidden_states` gives rows; without it, such a request is refused.
        root: results folder of the plug-in; None for a server without it.
        chunk: tokens of a prefill chunk; -1 for no chunks.
        keeps_chunks: whether the rows of every chunk come back.
        namespaces: whether an `extra_key` separates the cache.
        drops: rows of every prompt that never come back.
        says_cached: whether answers have `cached_tokens`.
        info: further fields of `/server_info`.
    """

    radix: bool = False
    warmed_up: bool = False
    states: bool = True
    root: Path | None = None
    chunk: int = -1
    keeps_chunks: bool = False
    namespaces: bool = True
    drops: int = 0
    says_cached: bool = True
    key: str | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        warm = [(None, [10, 11, 12, 900])] if self.radix and self.warmed_up else []
        # a cache for each data parallel rank; requests take turns
        self.caches: list[list[tuple[str | None, list[int]]]] = [
            [*warm] for _ in range(self.info.get("dp_size", 1))
        ]

    def server_info(self) -> dict[str, Any]:
        return {
            "version": "0.5.23",
            "served_model_name": "stub",
            "skip_tokenizer_init": True,
            "page_size": 1,
            "chunked_prefill_size": self.chunk,
            "disable_radix_cache": not self.radix,
            "max_req_input_len": 8192,
            **self.info,
        }

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and answer of a request."""
        if body.get("return_hidden_states") and not self.states:
            return 400, {"error": {"message": "not configured to return hidden states"}}
        ids = body.get("input_ids") or [hash(body["text"]) % 997] * 9
        space = body.get("extra_key") if self.namespaces else None
        self.caches.append(self.caches.pop(0))
        cached = self._cached(space, ids) if self.radix else 0
        self.caches[0].append((space, ids))
        new = len(ids) - cached
        rows = new if self.keeps_chunks or self.chunk <= 0 else (new - 1) % self.chunk + 1
        meta: dict[str, Any] = {"prompt_tokens": len(ids)}
        if self.says_cached:
            meta["cached_tokens"] = cached
        if body.get("return_hidden_states"):
            meta["hidden_states"] = [[[0.5, 0.5]] * (rows - self.drops)]
        if self.root and (destination := protocol.parse_rid(body.get("rid", ""))):
            self._receipt(destination, cached=cached)
            meta[protocol.ANSWER_KEY] = [json.dumps({"plugin": "1"})]
        return 200, {"output_ids": [1], "meta_info": meta}

    def _cached(self, space: str | None, ids: list[int]) -> int:
        """Return how many first tokens the cache holds; the last one is always computed."""
        longest = 0
        for other, known in self.caches[0]:
            same = 0
            while other == space and same < min(len(ids) - 1, len(known)):
                if ids[same] != known[same]:
                    break
                same += 1
            longest = max(longest, same)
        return longest

    def _receipt(self, destination: protocol.Destination, *, cached: int) -> None:
        """Append a receipt as the plug-in does, which captures the rows of every chunk."""
        rows = destination.rows - cached
        receipt = protocol.Receipt(
            rid=destination.rid,
            rows=rows,
            chunks=-(-rows // self.chunk) if self.chunk > 0 else 1,
            cached_tokens=cached,
            ids_hash=destination.ids_hash,
            checksum="0" * 16,
        )
        assert self.root
        path = protocol.growing_receipts(self.root / destination.file)
        with open(path, "ab") as file:
            file.write(receipt.line())


@contextlib.contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """Serve a stub on a free port, and yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*((200, stub.server_info()) if self._allowed() else (401, {})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(*(stub.generate(body) if self._allowed() else (401, {})))

        def _allowed(self) -> bool:
            return stub.key is None or self.headers.get("Authorization") == f"Bearer {stub.key}"

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
