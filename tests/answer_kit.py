"""Parts that tests of answers share: a server of ready answers, and a source of prompts."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from token_kit import template, tokenizer_folder

from draftstates.answers.answer import answer_chunk
from draftstates.answers.prompts import write_prompts
from draftstates.config import Answers, Sampling
from draftstates.records import Prompts
from draftstates.tokens.sources import TokeniseOptions

# what a server samples: ids from ids
Says = Callable[[list[int]], list[int]]


def says(text: str, *, name: str = "smollm2") -> list[int]:
    """Return the ids of a text, marks included."""
    return template(name).encode(text).tolist()


class StubServer:
    """A server that answers with ready ids.

    Attributes:
        url: its address.
        requests: the bodies that it got.
        say: the answer to ids; may be replaced.
        change: changes the answer to a request, to plant a fault.
    """

    def __init__(self, say: Says) -> None:
        self.say, self.requests = say, []
        self.change: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda body, answer: answer
        self.url = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        room = body["sampling_params"]["max_new_tokens"]
        output = self.say(body["input_ids"])
        is_cut = len(output) > room
        output = output[:room]
        answer = {
            "output_ids": output,
            "meta_info": {
                "finish_reason": {"type": "length" if is_cut else "stop"},
                "output_token_logprobs": [[-0.5, token, None] for token in output],
                "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": 1,
            },
        }
        return self.change(body, answer)


@contextlib.contextmanager
def stub_server(say: Says) -> Iterator[StubServer]:
    """Run a server until the block ends."""
    stub = StubServer(say)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(stub.answer(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asking(max_tokens: int = 512, **answers: Any) -> TokeniseOptions:
    """Return options of a source with `answers`."""
    sampling = Sampling(**answers.pop("sampling", {"max_new_tokens": 64}))
    chosen = Answers(sampling=sampling, **answers)
    return TokeniseOptions(max_tokens=max_tokens, answers=chosen)


def user(*texts: str) -> dict[str, Any]:
    """Return a row of questions with the data's own answers between them."""
    messages = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Theirs."}]
    return {"messages": messages[:-1]}


def prompts_of(
    folder: Path, rows: list[Any], options: TokeniseOptions, *, name: str = "smollm2"
) -> Prompts:
    """Write the prompts of a source with these rows into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_prompts(
        source="chats",
        paths=[data],
        tokenizer_path=tokenizer_folder(name),
        options=options,
        output=folder / "prompts.parquet",
    )


def answer_all(
    folder: Path,
    options: TokeniseOptions,
    url: str | None,
    *,
    name: str = "smollm2",
    failed: Path | None = None,
) -> list[dict[str, float] | None]:
    """Answer each chunk of the prompts in `folder` into `folder/key`; return the jobs' figures."""
    return [
        answer_chunk(
            chunk.chunk_id,
            prompts=folder / "prompts.parquet",
            tokenizer_path=tokenizer_folder(name),
            options=options,
            url=url,
            api_key=None,
            failed=failed,
            output=folder / "key" / f"{chunk.chunk_id}.parquet",
        )
        for chunk in Prompts.read(folder / "prompts.json").chunks
        if not (folder / "key" / f"{chunk.chunk_id}.parquet").exists()
    ]
