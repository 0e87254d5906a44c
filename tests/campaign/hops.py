"""Hops of one sample: how far a reader goes through the code from the data set to the manifest.

    PYTHONPATH=tests:tests/unit/capture python tests/campaign/hops.py [--list]

A row of `messages` goes the whole way in this process: read, rendered, masked, planned, captured by
the plug-in behind a toy model, verified and listed in a manifest. Then two rows, in a shard each,
go the same way. The calls that are made more often for two rows than for one, by the same callers,
are the sample's way. A hop is the first of them to a function, or the function that leads there: a
reader opens each function once. A return is a hop into a file that was opened before and left, so
that no function of it is among the callers. A function within a function is a part of it, and a
property reads like a field. `AROUND` is not followed: it concerns the model, the configuration and
names of files.

`--list` prints the hops in the order of the calls, with the returns marked.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import http.server
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Self

import torch
from captured import SELFTEST, parity_of
from safetensors.torch import save_file
from toy_model import HIDDEN, LAYERS, Model, Pair

import draftstates
from draftstates import config
from draftstates.capture.admission import Admission, answering
from draftstates.capture.blocks import BlockPool
from draftstates.capture.files import Destinations
from draftstates.capture.own_capture import OwnCapture
from draftstates.capture.recorder import VERSION, Recorder
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.taps import Taps
from draftstates.capture.writer import Writers
from draftstates.extract.client import Endpoint
from draftstates.extract.extract import ExtractOptions, extract_shard
from draftstates.extract.protocol import ANSWER_KEY, ROW_TOKENS
from draftstates.model.digest import configured_capture
from draftstates.paths import Capture, Results
from draftstates.plan.plan import PlanOptions, make_plan
from draftstates.plan.shard_tokens import read_tokens
from draftstates.shards.manifest import write_manifest
from draftstates.spec import CaptureSpec
from draftstates.tokens.sources import source_options
from draftstates.tokens.tokenise import tokenise_source
from draftstates.verify.verify import verify_shard

PACKAGE = Path(draftstates.__file__).parent
DEMO = PACKAGE.parent / "models" / "SmolLM2-135M-Instruct"
ROWS = [
    [
        {"role": "user", "content": f"Which number follows {number}?"},
        {"role": "assistant", "content": f"{number + 1} follows {number}. {'So it does. ' * 8}"},
    ]
    for number in range(3)
]
# not followed: what concerns the model, the configuration, the images and names of files
AROUND = ("config", "containers.py", "engine/", "errors.py", "model/", "paths.py")


# (file, function)
Place = tuple[str, str]


class Calls:
    """The calls of the package's functions in all threads, each with its callers, nearest first."""

    def __init__(self) -> None:
        self.found: list[tuple[Place, tuple[Place, ...]]] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[Self]:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (callee := place(frame)):
            callers = tuple(found for each in frames(frame.f_back) if (found := place(each)))
            if callers[:1] != (callee,):
                self.found.append((callee, callers))


@dataclasses.dataclass(frozen=True)
class Hop:
    """The first call of a function on the sample's way.

    Attributes:
        depth: number of its callers.
        is_return: whether its file was opened before and left.
    """

    place: Place
    depth: int
    is_return: bool


def hops(one: Calls, two: Calls) -> list[Hop]:
    """Return the hops of a sample, from the calls for one row and for two rows."""
    left = Counter(one.found)
    found: dict[Place, Hop] = {}
    for call in two.found:
        # as many as one row makes are set-up, or the way of the other row
        left[call] -= 1
        if left[call] >= 0:
            continue
        callee, callers = call
        for depth, function in enumerate([*reversed(callers), callee]):
            if function not in found:
                files = {file for file, _ in found}
                open_now = {file for file, _ in callers[len(callers) - depth :]}
                found[function] = Hop(function, depth, function[0] in files - open_now)
    return list(found.values())


def is_around(file: str) -> bool:
    return file.startswith(AROUND)


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the nearest first."""
    while frame:
        yield frame
        frame = frame.f_back


def place(frame: FrameType) -> Place | None:
    """Return file and function of a frame; None if it is none on the way."""
    return _place(frame.f_code.co_filename, frame.f_code.co_qualname)


@functools.cache
def _place(filename: str, name: str) -> Place | None:
    file = Path(filename)
    if not file.is_relative_to(PACKAGE) or is_around(str(file.relative_to(PACKAGE))):
        return None
    name = name.partition(".<locals>")[0]
    return (str(file.relative_to(PACKAGE)), name) if name in functions(file) else None


@functools.cache
def functions(file: Path) -> frozenset[str]:
    """Return the functions and methods of a file that are no properties."""
    found = set()
    body = [("", node) for node in ast.parse(file.read_text()).body]
    for prefix, node in body:
        if isinstance(node, ast.ClassDef):
            body += [(f"{prefix}{node.name}.", inner) for inner in node.body]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            "property" in ast.unparse(each) for each in node.decorator_list
        ):
            found.add(prefix + node.name)
    return frozenset(found)


class Server:
    """A server of a toy model, with the plug-in's own hook behind the model's logits."""

    def __init__(self, results: Path, spec: CaptureSpec, model: Model, head: torch.Tensor) -> None:
        os.environ["DRAFTSTATES_SERVER"] = "1:2:toy"
        settings = CaptureSettings(root=results, spec=spec)
        admission = Admission(settings)
        recorder = Recorder(settings, admission)
        recorder._taps = Taps(
            model,
            layers=spec.residual_layers,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            dtype=torch.float32,
            final_norm=spec.final_norm,
        )
        recorder._own, recorder._final_scale, recorder._stream = OwnCapture(model, []), 1.0, None
        recorder._destinations = Destinations(settings)
        recorder._writers = Writers(recorder._destinations, threads=1)
        recorder._pool = BlockPool(total_bytes=1 << 22, block_bytes=1 << 20, pinned=False)
        self._hook = answering(recorder.after_logits, version=VERSION)
        self._model, self._head, self._turn = model, head, threading.Lock()

    @torch.no_grad()
    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the `meta_info` of a request, after a pass of the model."""
        ids, result = torch.tensor(body["input_ids"]), SimpleNamespace(customized_info=None)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: True),
            rids=[body["rid"]],
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[len(ids)],
            input_ids=ids,
        )
        with self._turn:
            final = self._model(ids, None, batch)
            self._hook(result, None, ids, final, None, batch)
        logprobs = (final @ self._head.T).log_softmax(-1)
        meta = {
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            ANSWER_KEY: result.customized_info[ANSWER_KEY],
            "output_top_logprobs": [_best(logprobs[-1], body["top_logprobs_num"])],
        }
        if body["logprob_start_len"] == 0:
            rows = list(zip(logprobs, [*ids[1:].tolist(), 0], strict=True))
            following = [(row[token].item(), token, None) for row, token in rows]
            meta["input_token_logprobs"] = [(None, ids[0].item(), None), *following[:-1]]
            meta["output_token_logprobs"] = following[-1:]
            meta["input_top_logprobs"] = [None, *(_best(row, ROW_TOKENS) for row in logprobs[:-1])]
        return meta


def _best(logprobs: torch.Tensor, count: int) -> list[tuple[float, int, None]]:
    found = logprobs.topk(count)
    return [(value.item(), token.item(), None) for value, token in zip(*found, strict=True)]


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """Serve on a free port, and yield the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = json.dumps({"meta_info": server.generate(body)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        listener.shutdown()
        listener.server_close()


def toy_folder(folder: Path) -> tuple[Model, torch.Tensor]:
    """Write a model's folder, with the tokenizer of the demo's; return the model and its head."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(DEMO / name)
    asked = json.loads((DEMO / "config.json").read_text())
    size = asked["vocab_size"]
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": size,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "max_position_embeddings": 8192,
        "num_attention_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    model = Model(Pair)
    model.embed = torch.nn.Embedding(size, HIDDEN)
    head = torch.randn(size, HIDDEN)
    tensors = {"model.norm.weight": model.last_norm.weight.detach(), "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors")
    return model, head


def go(folder: Path, rows: Sequence[list[dict[str, str]]], toy: tuple[Model, torch.Tensor]) -> None:
    """Bring rows from their file into a manifest, each in a shard of its own."""
    folder.mkdir()
    source, results, model = folder / "rows.jsonl", folder / "results", folder.parent / "model"
    source.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = config.resolve(
        {
            "model": {"path": str(model)},
            "data": {"max_tokens": 512, "sources": [{"name": "rows", "files": [str(source)]}]},
            "capture": {
                "residual_layers": [1, LAYERS],
                "final_norm": "post_norm",
                "stored_dtype": "float32",
                "compute_dtype": "float32",
            },
            "shards": {"min_bytes": 1, "max_bytes": 9000},
            "results": str(results),
        },
        origin="config.yaml",
    )
    files, spec = Results(results), configured_capture(settings)
    paths, options = source_options(settings, "rows")
    tokenise_source(
        name="rows",
        paths=paths,
        tokenizer_path=model,
        options=options,
        output=files.tokens("rows"),
        accounting=files.accounting("rows"),
    )
    plan = make_plan(
        [files.tokens("rows")],
        spec=spec,
        results=results,
        options=PlanOptions(
            **dict(settings.shards),
            **dict(settings.checks),
            budget=None,
            exclude=[],
            deduplicate=True,
        ),
    )
    assert len(plan.shards) == len(rows), f"expected a shard a row, found {len(plan.shards)}"
    plan.publish(files.plan)
    capture = Capture(results / plan.capture_folder)
    with serving(Server(results.resolve(), spec, *toy)) as url:
        for planned in plan.shards:
            extract_shard(
                read_tokens(files.shard_tokens(planned.shard_id), shard_id=planned.shard_id),
                spec=spec,
                endpoint=Endpoint(url=url, api_key=None, root=results.resolve()),
                engine="toy",
                options=ExtractOptions(**dict(settings.extract), **dict(settings.checks)),
                output=capture.shard(planned.shard_id).resolve(),
                planned=[each.shard_id for each in plan.shards],
                selftest=SELFTEST,
            )
    for planned in plan.shards:
        verify_shard(
            planned,
            spec=spec,
            checks=plan.checks,
            model=model,
            shard=capture.shard(planned.shard_id),
            recaptures=capture.recaptures(planned.shard_id),
            receipts=capture.receipts(planned.shard_id),
            threads=1,
        ).publish(capture.verified(planned.shard_id))
    parity_of(spec).publish(capture.parity)
    write_manifest(
        plan,
        tokens=files.shard_tokens_folder,
        capture_folder=capture.folder,
        manifest=capture.manifest,
        samples=capture.samples,
        parity="required",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every hop")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        toy = toy_folder(Path(folder) / "model")
        # what is kept once it is made shall not count
        go(Path(folder) / "before", ROWS[:1], toy)
        with Calls().counted() as one:
            go(Path(folder) / "one", ROWS[:1], toy)
        with Calls().counted() as two:
            go(Path(folder) / "two", ROWS[1:], toy)
    found = hops(one, two)
    if arguments.list:
        for hop in found:
            print("<" if hop.is_return else " ", "  " * hop.depth + ":".join(hop.place))
    stages = Counter(hop.place[0].partition("/")[0] for hop in found)
    print(", ".join(f"{stage} {count}" for stage, count in stages.most_common()))
    returns, files = sum(hop.is_return for hop in found), {hop.place[0] for hop in found}
    print(f"{len(found)} hops through {len(files)} files, {returns} of them returns")


if __name__ == "__main__":
    main()
