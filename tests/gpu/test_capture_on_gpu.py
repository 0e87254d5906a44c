"""Capture on a real GPU: counts, alignment, parity with Hugging Face in bfloat16, chunks, batches
and repeats.

Needs an NVIDIA GPU and SGLang; DRAFTSTATES_GPU_FLAGS holds the server's flags.
"""

import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
import gpu_models  # noqa: E402
from server_harness import Running, capture, random_ids, serve, spec_for  # noqa: E402

from draftstates import ids  # noqa: E402
from draftstates.capture.every_layer import row_distances  # noqa: E402
from draftstates.extract.extract import ExtractOptions, extract_shard  # noqa: E402
from draftstates.model.folder import ModelFolder  # noqa: E402
from draftstates.model.head import read_head  # noqa: E402
from draftstates.paths import recaptures_of, receipts_of  # noqa: E402
from draftstates.plan.shard_tokens import ShardTokens  # noqa: E402
from draftstates.records import PlannedChecks, PlannedShard  # noqa: E402
from draftstates.verify.alignment import Rounding, check_alignment  # noqa: E402
from draftstates.verify.parity.check import compare_prompt, sample_prompt  # noqa: E402
from draftstates.verify.parity.compare import Limit, fault  # noqa: E402
from draftstates.verify.parity.streamed import StreamedModel  # noqa: E402
from draftstates.verify.verify import verify_shard  # noqa: E402

FLAGS = os.environ.get("DRAFTSTATES_GPU_FLAGS", "").split()
LENGTHS = [1, 10, 700, 1500, 5000, *range(40, 640, 20)]
LAYERS = (0, 2, 4, 5, 8)


@pytest.fixture(scope="module", params=["dense", "mla"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Chunks of 1024 tokens, overlap scheduling on."""
    folder = gpu_models.make(request.param, tmp_path_factory.mktemp(request.param) / "model")
    root = tmp_path_factory.mktemp("root")
    spec = spec_for(folder, layers=LAYERS, dtype="bfloat16", server_flags=FLAGS)
    flags = ["--chunked-prefill-size", "1024"]
    with serve(
        spec,
        folder=folder,
        root=root,
        base_flags=FLAGS,
        flags=flags,
        queue={"queue_bytes": 1 << 30},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def captured(running: Running) -> tuple:
    samples = [random_ids(n, seed=n, vocabulary=32000) for n in LENGTHS]
    return (samples, *capture(running, samples, kind="p", tokens_in_flight=1 << 20))


def test_every_row_is_counted(captured: tuple) -> None:
    samples, shard, receipts, refused = captured
    assert not refused
    assert [c.receipt.rows for c in receipts] == LENGTHS
    assert [shard.checksum(i) for i in range(len(samples))] == [
        c.receipt.checksum for c in receipts
    ]
    assert max(c.receipt.chunks for c in receipts) >= 5


def test_captured_layers_are_what_a_second_reading_gives(captured: tuple) -> None:
    differences = [distance for c in captured[2] for distance in c.opinions.values()]
    print("largest distance from a second reading:", max(differences))
    assert max(differences) < 2**-5
    # SGLang's own capture reaches neither r_0 nor r_N; the model's norm judges r_N.
    assert {name for c in captured[2] for name in c.opinions} == {f"r_{k}" for k in LAYERS[1:]}


def test_the_last_states_give_the_servers_own_next_tokens(
    running: Running, captured: tuple
) -> None:
    samples, shard, receipts, _ = captured
    last = torch.cat([shard.sample(i)["final_hidden_state"][-1:] for i in range(len(samples))])
    rounding = Rounding(compute=torch.bfloat16, stored=torch.bfloat16, normed=True)
    findings, shares = check_alignment(
        [str(n) for n in LENGTHS],
        last,
        [c.top for c in receipts],
        head=read_head(ModelFolder(running.model), final_norm="post_norm"),
        rounding=rounding,
    )
    print("alignment, worst share of the limit:", max(shares.values()))
    assert not findings, findings[0]
    swapped, _ = check_alignment(
        ["a", "b"],
        last[[2, 1]],
        [receipts[1].top, receipts[2].top],
        head=read_head(ModelFolder(running.model), final_norm="post_norm"),
        rounding=rounding,
    )
    assert len(swapped) == 2


def test_parity_with_hugging_face_layer_by_layer(running: Running, captured: tuple) -> None:
    samples, shard, *_ = captured
    reference = StreamedModel(ModelFolder(running.model), device="cuda")
    limit = Limit.of(compute="bfloat16", stored="bfloat16")
    medians: dict[str, list[float]] = {}
    for index in (1, 2, 4, 10):
        prompt = sample_prompt(shard, index, num_layers=reference.num_layers)
        for layer in compare_prompt(prompt, reference.states(prompt.input_ids), limit=limit):
            print(layer)
            medians.setdefault(layer.layer, []).append(layer.median)
            assert fault(layer) is None
    print({name: f"{statistics.median(values):.2g}" for name, values in medians.items()})


def test_a_second_pass_agrees_within_rounding(running: Running, captured: tuple) -> None:
    samples, shard, *_ = captured
    again, _, refused = capture(running, samples, tokens_in_flight=1 << 20)
    alone, _, refused_alone = capture(running, samples[:12], tokens_in_flight=1)
    assert not refused
    assert not refused_alone
    for other, rows in ((again, shard.header.rows), (alone, alone.header.rows)):
        for name in ("hidden_states", "final_hidden_state"):
            distance = row_distances(
                other.state_rows(name, 0, rows), shard.state_rows(name, 0, rows)
            )
            print(name, "median", distance.median().item(), "worst", distance.max().item())
            assert distance.median() < 2**-6


def test_a_shard_with_every_prefix_captured_again_passes_verification(running: Running) -> None:
    """With random experts more rows are routed otherwise in another batch than in a trained model:
    the limits must bear that.
    """
    samples = [random_ids(n, seed=n, vocabulary=32000) for n in LENGTHS]
    masks = [np.ones(len(sample), np.uint8) for sample in samples]
    names = [ids.sample_id(sample, mask) for sample, mask in zip(samples, masks, strict=True)]
    tokens = ShardTokens(
        shard_id=ids.shard_id(names),
        sample_ids=names,
        lengths=[len(sample) for sample in samples],
        input_ids=np.concatenate(samples),
        loss_mask=np.concatenate(masks),
    )
    output = running.endpoint.root / "run" / "shards" / f"{tokens.shard_id}.safetensors"
    options = ExtractOptions(recapture_fraction=1.0, tokens_in_flight=1 << 20)
    extract_shard(
        tokens,
        spec=running.spec,
        endpoint=running.endpoint,
        engine="gpu",
        options=options,
        output=output,
        planned=[tokens.shard_id],
    )
    planned = PlannedShard(
        shard_id=tokens.shard_id,
        source="gpu",
        samples=len(samples),
        tokens=len(tokens.input_ids),
        supervised_tokens=int(tokens.loss_mask.sum()),
        bytes=0,
    )
    checks = PlannedChecks(
        recapture_fraction=options.recapture_fraction, recapture_minimum=options.recapture_minimum
    )
    recaptures, receipts = recaptures_of(output), receipts_of(output)
    verified = verify_shard(
        planned,
        spec=running.spec,
        checks=checks,
        model=running.model,
        shard=output,
        recaptures=recaptures,
        receipts=receipts,
        threads=4,
    )
    print("verified with every prefix:", verified.figures)
    assert verified.figures.recaptures == len(samples)


def test_with_prefill_graphs_the_server_does_not_start(running: Running, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    flags = ["--cuda-graph-backend-prefill", "breakable"]
    starting = serve(
        running.spec, folder=running.model, root=tmp_path / "root", base_flags=FLAGS, flags=flags
    )
    with pytest.raises(AssertionError, match="add --cuda-graph-backend-prefill disabled"), starting:
        pass
