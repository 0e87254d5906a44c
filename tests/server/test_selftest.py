"""The self-test: it passes on a right server, refuses a wrong one and names the fault."""

import asyncio
import dataclasses
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from safetensors.torch import load_file, save_file
from server_harness import (
    Running,
    capture,
    check_parity,
    new_shard,
    random_ids,
    rows_on_disk,
    serve,
    spec_for,
)

from draftstates.errors import UserError
from draftstates.extract.client import Client, Work
from draftstates.model.folder import ModelFolder
from draftstates.shards.layout import Shard
from draftstates.shards.selftest_rows import SelftestRows, read_id
from draftstates.verify.parity import check
from draftstates.verify.selftest import attest

pytestmark = pytest.mark.server
FAULTS = Path(__file__).parent / "faults"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("qwen3", tmp_path_factory.mktemp("qwen3") / "model")


def refused(running: Running, spec: object = None) -> str:
    with pytest.raises(UserError) as caught:
        attest(running.endpoint, spec=spec or running.spec, model=running.model)
    return str(caught.value)


def test_a_right_server_passes_and_says_what_it_is(server: Running, tmp_path: Path) -> None:
    rows = tmp_path / "selftest.safetensors"
    found = attest(server.endpoint, spec=server.spec, model=server.model, rows=rows)
    assert found["capture_key"] == server.spec.key
    assert found["engine"]["version"]
    assert found["flags"]["disable_radix_cache"] is True
    assert found["settings"]["numbers"]["compute_dtype"] == "float32"
    assert found["settings"]["numbers"]["kv_cache_dtype"] == "float32"
    assert found["settings"]["numbers"]["weight_dtypes"] == "['float32']"
    assert found["settings"]["kernels"]["attention_backend"] == "torch_native"
    for name in ("norm_distance", "own_capture_distance", "embedding_distance"):
        assert found["self_test"][name] < 1e-6, name
    assert found["self_test"]["own_capture_missing"] == ""
    assert found["self_test"]["repeat_distance"] < 1e-4
    assert found["self_test"]["rows"] == read_id(rows)
    check_every_layer(rows, server, layers=30)
    assert not (server.endpoint.root / ".selftest").exists()


def check_every_layer(path: Path, running: Running, *, layers: int) -> None:
    """Check that the self-test's rows of every layer are those of the checkpoint."""
    parity = check.check_parity(
        SelftestRows.read(path),
        spec=running.spec,
        model=ModelFolder(running.model),
        asked=check.Asked(tokens=64, layers=None, code="0"),
    )
    assert parity.result == f"all {layers} layers"
    assert [layer.layer for layer in parity.layers][:-1] == [f"r_{k}" for k in range(layers + 1)]


def test_a_server_with_its_radix_cache_on_is_refused_by_count(shared_server: Running) -> None:
    message = refused(shared_server)
    assert "1 of 10 rows captured: 9 came from a cache" in message


def test_with_a_namespace_for_each_attempt_it_passes(shared_server: Running) -> None:
    endpoint = dataclasses.replace(shared_server.endpoint, fresh_namespace=True)
    attest(endpoint, spec=shared_server.spec, model=shared_server.model)


def test_a_server_that_captures_other_layers_is_refused(server: Running) -> None:
    other = dataclasses.replace(server.spec, residual_layers=(2, 14, 27))
    assert (
        "laid out for residual_layers (2, 14, 27), but this server captures (0, 2, 15, 27, 30)"
        in refused(server, other)
    )


def test_where_the_model_is_not_the_one_of_the_plan_it_is_refused(server: Running) -> None:
    other = dataclasses.replace(server.spec, model_digest="content-of-another")
    assert "expected content content-of-another, found content-" in refused(server, other)


def test_a_server_that_does_not_see_the_folder_is_refused(server: Running, tmp_path: Path) -> None:
    endpoint = dataclasses.replace(server.endpoint, root=tmp_path)
    with pytest.raises(UserError, match=r"the server sees no .*; its root is .*/root"):
        attest(endpoint, spec=server.spec, model=server.model)


def test_nothing_is_written_outside_the_root(server: Running, tmp_path: Path) -> None:
    """The server refuses a way out of the root even if it is a link that lies inside."""
    outside = dataclasses.replace(
        server, endpoint=dataclasses.replace(server.endpoint, root=tmp_path)
    )
    sample = random_ids(5, seed=1, vocabulary=100)
    path = new_shard(outside, [sample])
    link = server.endpoint.root / ".building" / path.name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(path)
    work = Work(sample_id="a", shard=link, first_row=0, input_ids=sample)

    async def go() -> dict[int, str]:
        async with Client(server.endpoint, tokens_in_flight=10) as client:
            return (await client.capture([work], retries=0))[1]

    assert "is a link: expected a file of its own" in asyncio.run(go())[0]
    assert rows_on_disk(Shard(path)) == 0


@pytest.fixture(scope="module")
def without_plugin(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("bare") / "root"
    root.mkdir()
    with serve(spec_for(qwen3, layers=(1, 3, 5)), folder=qwen3, root=root, plugin=False) as running:
        yield running


def test_a_server_without_the_plugin_is_refused(without_plugin: Running) -> None:
    assert "started without the draftstates plug-in" in refused(without_plugin)


@pytest.fixture(scope="module")
def faulty(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server whose capture has the fault that a file in its folder names.

    `tests/server/faults` has the faults.
    """
    root = tmp_path_factory.mktemp("faulty") / "root"
    root.mkdir()
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "DRAFTSTATES_TEST_FAULT": str(root / "fault")}
    with serve(
        spec_for(qwen3, layers=(0, 1, 3, 6)),
        folder=qwen3,
        root=root,
        environment=environment,
        flags=["--chunked-prefill-size", "128"],
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", None),
        ("one_layer_off", "r_1 as captured differs by .* SGLang's own capture"),
        ("residual_left_out", "r_6: the model's own norm of it differs by"),
        ("embedding_scaled_twice", "r_0 differs by .* from the embedding on the disk"),
        ("other_the_second_time", "the same prompts, captured twice, differ by"),
        ("pre_norm_labelled_post_norm", "alignment"),
        ("rows_of_another_request", "alignment|prefix"),
        ("shifted_by_one", "alignment|prefix"),
        ("zero_row", "all zero"),
        ("nan", "not finite"),
        ("other_ids", "the rows are those of other ids"),
        ("lost_chunk", "rows captured"),
        ("exception", "the plug-in failed: RuntimeError: planted"),
    ],
)
def test_a_fault_at_capture_is_caught(faulty: Running, fault: str, message: str | None) -> None:
    (faulty.endpoint.root / "fault").write_text(fault)
    if message is None:
        attest(faulty.endpoint, spec=faulty.spec, model=faulty.model)
        return
    with pytest.raises(UserError, match=message):
        attest(faulty.endpoint, spec=faulty.spec, model=faulty.model)


def update_weights(running: Running, folder: Path) -> None:
    body = json.dumps({"model_path": str(folder), "flush_cache": True}).encode()
    request = urllib.request.Request(
        f"{running.endpoint.url}/update_weights_from_disk",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["success"]


def test_after_an_update_of_the_weights_nothing_is_captured_until_a_self_test_passes(
    faulty: Running, tmp_path: Path
) -> None:
    (faulty.endpoint.root / "fault").write_text("none")
    sample = random_ids(9, seed=1, vocabulary=tiny_models.VOCABULARY)
    other = shutil.copytree(faulty.model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    layer = "model.layers.3.mlp.up_proj.weight"
    tensors[layer] = tensors[layer] * 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    update_weights(faulty, other)
    _, captured, reasons = capture(faulty, [sample])
    assert not captured
    assert "the weights were changed by update_weights_from_disk since the self" in reasons[0]
    # the head is the same, and every check of the rows would pass
    assert "are no longer those of the model that was loaded" in refused(faulty)
    assert capture(faulty, [sample])[2]

    update_weights(faulty, faulty.model)
    assert capture(faulty, [sample])[2]
    attest(faulty.endpoint, spec=faulty.spec, model=faulty.model)
    _, captured, reasons = capture(faulty, [sample])
    assert captured
    assert not reasons


def test_the_server_writes_no_published_shard(faulty: Running) -> None:
    """The file is laid out for this capture, below the root, and complete."""
    (faulty.endpoint.root / "fault").write_text("none")
    sample = random_ids(5, seed=2, vocabulary=tiny_models.VOCABULARY)
    built = new_shard(faulty, [sample])
    published = faulty.endpoint.root / "tiny-01234567" / "shards" / built.name
    published.parent.mkdir(parents=True)
    built.rename(published)
    before = published.read_bytes()
    work = Work(sample_id="a", shard=published, first_row=0, input_ids=sample)

    async def go() -> dict[int, str]:
        async with Client(faulty.endpoint, tokens_in_flight=10) as client:
            return (await client.capture([work], retries=0))[1]

    assert "a server writes shards under construction alone" in asyncio.run(go())[0]
    assert published.read_bytes() == before
    assert [path.name for path in published.parent.iterdir()] == [published.name]


def test_a_later_server_is_held_to_the_rows_of_the_first(faulty: Running, tmp_path: Path) -> None:
    """The rows of another model under the same key: here they are changed in the file."""
    (faulty.endpoint.root / "fault").write_text("none")
    rows = tmp_path / "selftest.safetensors"
    first = attest(faulty.endpoint, spec=faulty.spec, model=faulty.model, rows=rows)
    check_every_layer(rows, faulty, layers=6)
    second = attest(faulty.endpoint, spec=faulty.spec, model=faulty.model, rows=rows)
    assert second["self_test"]["rows"] == first["self_test"]["rows"] == read_id(rows)
    kept = SelftestRows.read(rows)
    kept.prompts[0].states["r_4"] *= 1.01
    kept.save(rows)
    match = r"other rows than .*: r_4: the median row differs by 0.0099"
    with pytest.raises(UserError, match=match):
        attest(faulty.endpoint, spec=faulty.spec, model=faulty.model, rows=rows)


def test_without_a_fault_qwen3s_rows_are_those_of_hugging_face(faulty: Running) -> None:
    (faulty.endpoint.root / "fault").write_text("none")
    samples = [random_ids(n, seed=n, vocabulary=tiny_models.VOCABULARY) for n in (7, 33, 90, 200)]
    shard, _, refused_samples = capture(faulty, samples)
    assert not refused_samples
    check_parity(shard, faulty.model, len(samples))
