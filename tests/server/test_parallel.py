"""Servers of other shapes: tensor and data parallel, a multimodal wrapper, retracted requests."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tiny_models
from server_harness import (
    Running,
    capture,
    check_parity,
    new_shard,
    post,
    random_ids,
    rows_on_disk,
    serve,
    spec_for,
)

from draftstates import ids
from draftstates.capture.every_layer import row_distances
from draftstates.capture.numbers import MADE_UP
from draftstates.extract import protocol
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec
from draftstates.verify.selftest import attest

pytestmark = pytest.mark.server
LAYERS = (0, 2, 3, 5, 6)
FAULTS = Path(__file__).parent / "faults"


def samples() -> list:
    return [random_ids(n, seed=n, vocabulary=tiny_models.VOCABULARY) for n in (9, 50, 150)]


def spec_of(folder: Path) -> CaptureSpec:
    return spec_for(folder, layers=LAYERS, final_norm="pre_norm")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shard]:
    """Yield a tiny Qwen2, pre-norm, and the capture of a server of one rank.

    The same server retracts requests while they decode.
    """
    folder = tiny_models.make("qwen2", tmp_path_factory.mktemp("one") / "model")
    root = folder.parent / "root"
    root.mkdir()
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
    with serve(spec_of(folder), folder=folder, root=root, environment=retract) as running:
        shard, _, refused = capture(running, samples())
        assert not refused
        check_retraction(running)
    return folder, shard


def check_retraction(running: Running) -> None:
    """Check that retracted requests have the same rows as requests that are not retracted.

    Requests that generate 12 tokens are retracted on the way and prefilled a second time.
    """
    parts = [random_ids(n, seed=n, vocabulary=tiny_models.VOCABULARY) for n in (60, 61, 62, 63)]
    undisturbed, _, _ = capture(running, parts)
    path = new_shard(running, parts)
    bodies, first = [], 0
    for part in parts:
        destination = protocol.Destination(
            file=str(path.relative_to(running.endpoint.root)),
            first_row=first,
            rows=len(part),
            ids_hash=ids.ids_hash(part),
            attempt="retract",
        )
        bodies.append(
            {
                "rid": destination.rid,
                "input_ids": part.tolist(),
                "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
            }
        )
        first += len(part)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(running, body), bodies))
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, answers
    time.sleep(0.5)
    found = protocol.ReceiptReader(protocol.growing_receipts(path)).new()
    assert len(found) == len(parts), found
    receipts = {protocol.parse_rid(r.rid).rows: r for r in found}
    shard = Shard(path)
    assert [receipts[len(part)].rows for part in parts] == [60, 61, 62, 63]
    assert [shard.checksum(i) for i in range(4)] == [receipts[len(part)].checksum for part in parts]
    for name in ("hidden_states", "final_hidden_state"):
        assert (
            row_distances(
                shard.state_rows(name, 0, first), undisturbed.state_rows(name, 0, first)
            ).max()
            < 1e-4
        )


def test_a_retracted_request_is_captured_whole_and_once(one: tuple) -> None:
    # The fixture has checked retraction on its server.
    assert one


def test_its_rows_are_those_of_hugging_face(one: tuple[Path, Shard]) -> None:
    folder, shard = one
    check_parity(shard, folder, len(samples()))


def test_of_two_tensor_parallel_ranks_one_writes_and_the_rows_are_the_same(
    one: tuple, tmp_path: Path
) -> None:
    folder, alone = one
    (tmp_path / "root").mkdir()
    flags = ["--tensor-parallel-size", "2"]
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    spec = spec_of(folder)
    with serve(
        spec, folder=folder, root=tmp_path / "root", flags=flags, environment=environment
    ) as running:
        shard, captured, refused = capture(running, samples())
        assert not refused
        assert running.log.read_text().count("captures r_k for k in") == 1, (
            "more than one rank writes"
        )
        lines = protocol.growing_receipts(shard.path).read_text().splitlines()
        # A receipt for each sample, and the line that says that all rows are synced.
        assert len(lines) == len(samples()) + 1
        attest(running.endpoint, spec=spec, model=folder)
    for name in ("hidden_states", "final_hidden_state"):
        rows = shard.header.rows
        assert (
            row_distances(shard.state_rows(name, 0, rows), alone.state_rows(name, 0, rows)).max()
            < 1e-4
        )


def test_two_data_parallel_ranks_fill_one_shard_together(one: tuple, tmp_path: Path) -> None:
    """Each rank captures every second sample; the shard is synced when both are through.

    The test runs on a CPU without data parallel attention.
    """
    folder, alone = one
    (tmp_path / "root").mkdir()
    environment = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        # These dumps take over a minute.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    spec = spec_of(folder)
    with serve(
        spec,
        folder=folder,
        root=tmp_path / "root",
        flags=["--data-parallel-size", "2"],
        environment=environment,
    ) as running:
        shard, _, refused = capture(running, samples() * 2, tokens_in_flight=1, sync_seconds=30)
        assert not refused
        assert running.log.read_text().count("captures r_k for k in") == 2
        attest(running.endpoint, spec=spec, model=folder)
        check_that_it_does_not_outlive_a_rank(running)
    rows = alone.header.rows
    for name in ("hidden_states", "final_hidden_state"):
        for start in (0, rows):
            assert (
                row_distances(
                    shard.state_rows(name, start, start + rows), alone.state_rows(name, 0, rows)
                ).max()
                < 1e-4
            )


def check_that_it_does_not_outlive_a_rank(running: Running) -> None:
    """Check that the server ends with a data parallel rank.

    SGLang does not see the rank's death: requests to it would wait until the client gives up.
    """
    processes = psutil.Process(running.process.pid).children(recursive=True)
    next(each for each in processes if each.name().startswith("sglang::sch")).kill()
    running.process.wait(60)
    assert "was killed; the server ends" in running.log.read_text()


def test_the_layers_inside_a_multimodal_wrapper_are_found(tmp_path: Path) -> None:
    """Kimi-K2.5's module layout: the entry hooks of the inner layers see the captured rows."""
    folder = tiny_models.make("kimi_k25", tmp_path / "model")
    (tmp_path / "root").mkdir()
    spec = CaptureSpec(
        model="kimi",
        model_digest=MADE_UP,
        compute_dtype="float32",
        quantization=None,
        stored_dtype="float32",
        num_layers=6,
        hidden_size=64,
        residual_layers=(2, 3, 4),
        final_norm="pre_norm",
    )
    environment = {
        "PYTHONPATH": os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")]),
        "DRAFTSTATES_TEST_TEXT_ONLY": "1",
    }
    flags = ["--load-format", "dummy"]
    with serve(
        spec, folder=folder, root=tmp_path / "root", flags=flags, environment=environment
    ) as running:
        shard, captured, refused = capture(running, samples(), kind=protocol.SELF_TEST)
        assert not refused
        assert rows_on_disk(shard) == sum(map(len, samples()))
        assert {k: v for c in captured for k, v in c.opinions.items()} == {
            "r_2": 0.0,
            "r_3": 0.0,
            "r_4": 0.0,
            "r_6": 0.0,
        }
