"""The real SGLang server on the CPU, for tests.

One context manager starts it; `capture` sends samples and reads the captured rows.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from draftstates.capture.settings import CaptureSettings
from draftstates.engine.flags import numeric
from draftstates.extract.client import Captured, Client, Endpoint, Work
from draftstates.model.digest import capture_spec
from draftstates.model.folder import ModelFolder
from draftstates.paths import BUILDING
from draftstates.plan.prefixes import Segments, shard_id
from draftstates.server.command import CPU_FLAGS as SERVER_CPU_FLAGS
from draftstates.server.local import free_port
from draftstates.shards import layout
from draftstates.spec import CaptureSpec
from draftstates.verify.parity.check import compare_prompt, sample_prompt
from draftstates.verify.parity.compare import Limit, fault
from draftstates.verify.parity.streamed import StreamedModel

START_SECONDS = int(os.environ.get("DRAFTSTATES_START_SECONDS", "600"))
CPU_FLAGS = [*SERVER_CPU_FLAGS, "--max-total-tokens", "16384"]
SMALL_QUEUE = {"queue_bytes": 64 << 20, "block_bytes": 4 << 20, "writers": 2}


@dataclasses.dataclass(frozen=True)
class Running:
    """Server that answers: its endpoint, its capture, its process and log."""

    endpoint: Endpoint
    spec: CaptureSpec
    model: Path
    process: subprocess.Popen
    log: Path


def spec_for(
    folder: Path,
    *,
    layers: Sequence[int],
    final_norm: str = "post_norm",
    dtype: str = "float32",
    server_flags: Sequence[str] = (),
) -> CaptureSpec:
    """Return the capture of a model folder with these layers, computed and stored in one dtype.

    Those of a server's flags that change numbers enter the key.
    """
    return capture_spec(
        ModelFolder(folder),
        name=None,
        capture={
            "residual_layers": layers,
            "final_norm": final_norm,
            "stored_dtype": dtype,
            "compute_dtype": dtype,
        },
        engine_args=numeric(server_flags),
    )


@contextlib.contextmanager
def serve(
    spec: CaptureSpec,
    *,
    folder: Path,
    root: Path,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    radix_cache: bool = False,
    plugin: bool = True,
    base_flags: Sequence[str] = CPU_FLAGS,
    queue: dict[str, int] = SMALL_QUEUE,
    log_folder: Path | None = None,
) -> Iterator[Running]:
    """Start SGLang on the model `folder` so that it captures `spec` below `root`.

    End its whole process group afterwards.
    """
    port, log = (
        free_port("127.0.0.1"),
        (log_folder or root.parent) / f"server-{uuid.uuid4().hex[:6]}.log",
    )
    settings = CaptureSettings(root=root, spec=spec, **queue)
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [*base_flags, "--dtype", spec.compute_dtype, "--skip-tokenizer-init", *flags]
    attention = {"--enable-dp-attention", "--attn-dp-size"} & {*command}
    # The workflow's own server has the same setting.
    command += [] if attention else ["--sleep-on-idle"]
    command += [] if radix_cache else ["--disable-radix-cache"]
    environment = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    environment |= settings.to_environment() if plugin else {}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield Running(Endpoint(url=url, api_key=None, root=root), spec, folder, process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if b"fired up and ready to roll" in log.read_bytes():
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{url}/health", timeout=5) as answer,
            ):
                if answer.status == 200:
                    return
        time.sleep(0.2)
    raise AssertionError(
        "the server is not ready (status"
        f" {process.poll()}):\n{log.read_text(errors='replace')[-4000:]}"
    )


def capture(
    server: Running,
    samples: Sequence[np.ndarray],
    *,
    kind: str = "c",
    prefix: bool = False,
    segments: Segments | None = None,
    compared: Collection[int] = (),
    tokens_in_flight: int = 8192,
    endpoint: Endpoint | None = None,
    retries: int = 0,
    sync_seconds: float = 60,
) -> tuple[layout.Shard, list[Captured], dict[int, str]]:
    """Capture `samples` (int32 ids each) into a new shard below the server's root.

    The shared rows of the samples `compared` are compared with the shard's. Return the shard, the
    captured samples, and the refused ones.
    """
    path = new_shard(server, samples, segments)
    places = segments or Segments.unshared([len(sample) for sample in samples])
    work = [
        Work(
            sample_id=str(i),
            shard=path,
            first_row=int(places.ends[i]),
            input_ids=sample,
            shared=places.shared(i),
            owners=tuple(int(places.ends[owner]) for owner in places.owners(i)),
            kind=kind,
            prefix=prefix,
            compared=i in compared,
        )
        for i, sample in enumerate(samples)
    ]

    async def go() -> tuple[list[Captured], dict[int, str]]:
        async with Client(endpoint or server.endpoint, tokens_in_flight=tokens_in_flight) as client:
            captured, refused = await client.capture(work, retries=retries)
            if not refused:
                await asyncio.wait_for(client.synced(path, rows=places.rows), sync_seconds)
            return captured, refused

    captured, refused = asyncio.run(go())
    return layout.Shard(path), captured, refused


def new_shard(
    server: Running, samples: Sequence[np.ndarray], segments: Segments | None = None
) -> Path:
    path = server.endpoint.root / BUILDING / f"{uuid.uuid4().hex}.safetensors"
    path.parent.mkdir(exist_ok=True)
    input_ids = np.concatenate(samples).astype(np.int32)
    names = [str(i) for i in range(len(samples))]
    layout.create(
        path,
        spec=server.spec,
        shard_id=shard_id(names, segments) if segments else "test",
        sample_ids=names,
        lengths=[len(s) for s in samples],
        input_ids=input_ids,
        loss_mask=np.ones(len(input_ids)),
        segments=segments,
    )
    return path


def post(server: Running, body: dict) -> dict:
    """Send a request as any program may, and return the answer."""
    request = urllib.request.Request(
        f"{server.endpoint.url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def random_ids(count: int, *, seed: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocabulary, count).astype(np.int32)


def rows_on_disk(shard: layout.Shard) -> int:
    """Return the number of rows of a laid-out file that are not all zero: the written ones."""
    states = shard.state_rows("final_hidden_state", 0, shard.header.rows)
    return int((states != 0).any(dim=-1).sum())


def worst_row_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest distance of two rows, divided by the row's norm."""
    one, other = one.float(), other.float()
    return ((one - other).norm(dim=-1) / other.norm(dim=-1)).max().item()


def check_parity(shard: layout.Shard, folder: Path, count: int) -> None:
    """Check that the right r_k of the first `count` samples is close to Hugging Face's.

    Its neighbours must be far.
    """
    reference = StreamedModel(ModelFolder(folder))
    limit = Limit.of(compute="float32", stored="float32")
    for index in range(count):
        prompt = sample_prompt(shard, index, num_layers=reference.num_layers)
        for layer in compare_prompt(prompt, reference.states(prompt.input_ids), limit=limit):
            assert fault(layer) is None
            assert layer.worst < 1e-3, layer
            assert all(distance > 0.02 for distance in layer.neighbours.values()), layer


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, with SGLang as installed."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
