"""Several GPUs: tensor parallel and data parallel attention capture the rows that one GPU captures,
each row by one writer.

`DRAFTSTATES_GPUS` is the number of GPUs, two without it.
"""

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

GPUS = int(os.environ.get("DRAFTSTATES_GPUS", "2"))
if torch.cuda.device_count() < GPUS:
    pytest.skip(f"needs {GPUS} NVIDIA GPUs", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
import gpu_models  # noqa: E402
from server_harness import Running, capture, random_ids, serve, spec_for  # noqa: E402

from draftstates.capture.every_layer import row_distances  # noqa: E402
from draftstates.extract import protocol  # noqa: E402
from draftstates.shards.layout import Shard  # noqa: E402
from draftstates.spec import CaptureSpec  # noqa: E402
from draftstates.verify.parity.compare import Limit  # noqa: E402
from draftstates.verify.selftest import attest  # noqa: E402

FLAGS = os.environ.get("DRAFTSTATES_GPU_FLAGS", "").split()
LAYERS = (0, 2, 4, 5, 8)
SAMPLES = [
    random_ids(n, seed=n, vocabulary=32000) for n in (1, 10, 700, 1500, 3000, *range(40, 440, 20))
]
TENSOR = ["--tensor-parallel-size", str(GPUS)]
DATA = [*TENSOR, "--data-parallel-size", str(GPUS), "--enable-dp-attention"]


def start(
    folder: Path, root: Path, spec: CaptureSpec, flags: list[str]
) -> AbstractContextManager[Running]:
    root.mkdir()
    flags = ["--chunked-prefill-size", "1024", *flags]
    return serve(
        spec,
        folder=folder,
        root=root,
        base_flags=FLAGS,
        flags=flags,
        queue={"queue_bytes": 1 << 30},
    )


def alone(folder: Path, spec: CaptureSpec) -> Shard:
    """Return the capture of one GPU."""
    with start(folder, folder.parent / "alone", spec, []) as running:
        shard, _, refused = capture(running, SAMPLES, tokens_in_flight=1 << 20)
        assert not refused
    return shard


@pytest.mark.parametrize(
    ("kind", "flags", "writers"),
    [("dense", TENSOR, 1), ("mla", DATA, GPUS)],
    ids=["tensor_parallel", "data_parallel_attention"],
)
def test_several_gpus_capture_the_rows_of_one(
    tmp_path: Path, kind: str, flags: list[str], writers: int
) -> None:
    folder = gpu_models.make(kind, tmp_path / "model")
    spec = spec_for(folder, layers=LAYERS, dtype="bfloat16", server_flags=FLAGS)
    expected = alone(folder, spec)
    with start(folder, tmp_path / "root", spec, flags) as running:
        shard, captured, refused = capture(running, SAMPLES, tokens_in_flight=1 << 20)
        assert not refused
        assert [c.receipt.rows for c in captured] == [len(s) for s in SAMPLES]
        assert [shard.checksum(i) for i in range(len(SAMPLES))] == [
            c.receipt.checksum for c in captured
        ]
        assert running.log.read_text(errors="replace").count("captures r_k for k in") == writers
        assert len(protocol.growing_receipts(shard.path).read_text().splitlines()) >= len(SAMPLES)
        print(attest(running.endpoint, spec=spec, model=folder)["self_test"])
    for name in ("hidden_states", "final_hidden_state"):
        rows = shard.header.rows
        distances = row_distances(
            shard.state_rows(name, 0, rows), expected.state_rows(name, 0, rows)
        )
        print(
            kind,
            writers,
            name,
            "median",
            distances.median().item(),
            "worst",
            distances.max().item(),
        )
        assert distances.median() < Limit.of(compute="bfloat16", stored="bfloat16").at(1)
