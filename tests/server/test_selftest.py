"""The self-test: it passes on a right server, refuses a wrong one and names the fault."""

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
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
from draftstates.shards.layout import Shard
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


def test_a_right_server_passes_and_says_what_it_is(server: Running) -> None:
    found = attest(server.endpoint, spec=server.spec, model=server.model)
    assert found["capture_key"] == server.spec.key
    assert found["engine"]["version"]
    assert found["flags"]["disable_radix_cache"] is True
    assert found["self_test"]["hook_distance"] == 0.0
    assert found["self_test"]["repeat_distance"] < 1e-4
    assert not (server.endpoint.root / ".selftest").exists()


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
    link = server.endpoint.root / path.name
    link.symlink_to(path)
    work = Work(sample_id="a", shard=link, first_row=0, input_ids=sample)

    async def go() -> dict[int, str]:
        async with Client(server.endpoint, tokens_in_flight=10) as client:
            return (await client.capture_all([work], retries=0))[1]

    assert "lies outside" in asyncio.run(go())[0]
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
        spec_for(qwen3, layers=(1, 3, 5)),
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
        ("one_layer_off", "as captured differs by"),
        ("pre_norm_labelled_post_norm", "alignment"),
        ("rows_of_another_request", "alignment|prefix"),
        ("shifted_by_one", "alignment|prefix"),
        ("zero_row", "all zero"),
        ("nan", "not finite"),
        ("other_ids", "the rows are those of other ids"),
        ("lost_chunk", "rows captured"),
    ],
)
def test_a_fault_at_capture_is_caught(faulty: Running, fault: str, message: str | None) -> None:
    (faulty.endpoint.root / "fault").write_text(fault)
    if message is None:
        attest(faulty.endpoint, spec=faulty.spec, model=faulty.model)
        return
    with pytest.raises(UserError, match=message):
        attest(faulty.endpoint, spec=faulty.spec, model=faulty.model)


def test_without_a_fault_qwen3s_rows_are_those_of_hugging_face(faulty: Running) -> None:
    (faulty.endpoint.root / "fault").write_text("none")
    samples = [random_ids(n, seed=n, vocabulary=tiny_models.VOCABULARY) for n in (7, 33, 90, 200)]
    shard, _, refused_samples = capture(faulty, samples)
    assert not refused_samples
    check_parity(shard, faulty.model, len(samples))
