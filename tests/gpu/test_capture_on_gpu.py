"""Capture on a real GPU: counts, alignment, parity with Hugging Face in bfloat16, chunks, batches and repeats.

Needs an NVIDIA GPU and SGLang; DRAFTSTATES_GPU_FLAGS holds the server's flags.
"""

import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
import gpu_models  # noqa: E402
from server_harness import Running, capture, random_ids, serve, spec_for  # noqa: E402

from draftstates import parity  # noqa: E402
from draftstates.alignment import Rounding, check_alignment  # noqa: E402
from draftstates.model import read_head  # noqa: E402

FLAGS = os.environ.get("DRAFTSTATES_GPU_FLAGS", "").split()
LENGTHS = [1, 10, 700, 1500, 5000, *range(40, 640, 20)]
LAYERS = (0, 2, 4, 5, 8)


@pytest.fixture(scope="module", params=["dense", "mla"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Chunks of 1024 tokens, overlap scheduling on."""
    folder = gpu_models.make(request.param, tmp_path_factory.mktemp(request.param) / "model")
    root = tmp_path_factory.mktemp("root")
    spec = spec_for(folder, layers=LAYERS, dtype="bfloat16")
    flags = ["--chunked-prefill-size", "1024"]
    with serve(spec, folder=folder, root=root, base_flags=FLAGS, flags=flags, queue={"queue_bytes": 1 << 30}) as server:
        yield server


@pytest.fixture(scope="module")
def captured(running: Running) -> tuple:
    samples = [random_ids(n, seed=n, vocabulary=32000) for n in LENGTHS]
    return (samples, *capture(running, samples, kind="p", tokens_in_flight=1 << 20))


def test_every_row_is_counted(captured: tuple) -> None:
    samples, shard, receipts, refused = captured
    assert not refused
    assert [c.receipt.rows for c in receipts] == LENGTHS
    assert [shard.checksum(i) for i in range(len(samples))] == [c.receipt.checksum for c in receipts]
    assert max(c.receipt.chunks for c in receipts) >= 5


def test_captured_layers_are_what_the_entry_hooks_saw(captured: tuple) -> None:
    differences = [c.prehook[str(k)] for c in captured[2] for k in LAYERS]
    print("largest distance from the entry hooks:", max(differences))
    assert max(differences) < 2**-7


def test_the_last_states_give_the_servers_own_next_tokens(running: Running, captured: tuple) -> None:
    samples, shard, receipts, _ = captured
    last = torch.cat([shard.sample(i)["final_hidden_state"][-1:] for i in range(len(samples))])
    rounding = Rounding(compute=torch.bfloat16, stored=torch.bfloat16, normed=True)
    findings, worst = check_alignment(
        [str(n) for n in LENGTHS], last, [c.top for c in receipts], head=read_head(running.model, final_norm="post_norm"), rounding=rounding
    )
    print("alignment, worst share of the limit:", worst)
    assert not findings, findings[0]
    swapped, _ = check_alignment(
        ["a", "b"],
        last[[2, 1]],
        [receipts[1].top, receipts[2].top],
        head=read_head(running.model, final_norm="post_norm"),
        rounding=rounding,
    )
    assert len(swapped) == 2


def test_parity_with_hugging_face_layer_by_layer(running: Running, captured: tuple) -> None:
    samples, shard, *_ = captured
    reference = parity.Reference(running.model, dtype=torch.bfloat16, device="cuda")
    medians: dict[str, list[float]] = {}
    for index in (1, 2, 4, 10):
        states = shard.sample(index)
        named = {f"r_{k}": states["hidden_states"][:, i] for i, k in enumerate(LAYERS)} | {"post_norm": states["final_hidden_state"]}
        found = parity.compare(named, reference.states(states["input_ids"]))
        for layer in found:
            print(layer)
            medians.setdefault(layer.layer, []).append(layer.median)
        parity.judge(found, dtype="bfloat16", sample=str(index))
    print({name: f"{statistics.median(values):.2g}" for name, values in medians.items()})


def test_a_second_pass_agrees_within_rounding(running: Running, captured: tuple) -> None:
    samples, shard, *_ = captured
    again, _, refused = capture(running, samples, tokens_in_flight=1 << 20)
    alone, _, refused_alone = capture(running, samples[:12], tokens_in_flight=1)
    assert not refused
    assert not refused_alone
    for other, rows in ((again, shard.header.rows), (alone, alone.header.rows)):
        for name in ("hidden_states", "final_hidden_state"):
            distance = parity.row_distances(other.states(name, 0, rows), shard.states(name, 0, rows))
            print(name, "median", distance.median().item(), "worst", distance.max().item())
            assert distance.median() < 2**-6
