"""The simulated run keeps its books, and where one thing alone limits it, takes as long as that
thing does.
"""

import dataclasses
import importlib.util
import sys
from math import inf
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def scheduler() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "scheduler.py"
    spec = importlib.util.spec_from_file_location("scheduler", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["scheduler"] = module
    spec.loader.exec_module(module)
    return module


SHARDS = [900, 1100, 1300, 700, 1000] * 8
TOKENS = sum(SHARDS)


def test_every_shard_is_verified_once_whatever_fails(scheduler: ModuleType) -> None:
    setup = scheduler.Setup(
        rate=100,
        replicas=3,
        streams=7,
        row_bytes=8,
        write=1000,
        cores=8,
        verify=400,
        start=5,
        failure=30,
    )
    outcome = scheduler.Simulation(SHARDS, setup, seed=1).run()
    assert sorted(outcome.verified) == list(range(len(SHARDS)))
    assert outcome.tokens == TOKENS
    assert outcome.lost > 0
    assert outcome.jobs > 2 * len(SHARDS)


def test_one_replica_without_limits_takes_tokens_over_rate(scheduler: ModuleType) -> None:
    outcome = scheduler.Simulation(SHARDS, scheduler.Setup(rate=50)).run()
    assert outcome.seconds == pytest.approx(TOKENS / 50)
    assert (outcome.lost, outcome.jobs) == (0, 2 * len(SHARDS))


def test_replicas_share_the_work(scheduler: ModuleType) -> None:
    outcome = scheduler.Simulation(
        [1000] * 40, scheduler.Setup(rate=50, replicas=4, streams=16)
    ).run()
    # 40 is no multiple of 16: the last ones run alone.
    assert outcome.seconds == pytest.approx(40 * 1000 / 200, rel=0.15)


def test_a_slow_disk_takes_bytes_over_its_rate(scheduler: ModuleType) -> None:
    outcome = scheduler.Simulation(
        SHARDS, scheduler.Setup(rate=1e6, replicas=2, row_bytes=10, write=500)
    ).run()
    assert outcome.seconds == pytest.approx(TOKENS * 10 / 500)


def test_slow_verification_takes_bytes_over_its_rate(scheduler: ModuleType) -> None:
    setup = scheduler.Setup(rate=1e9, row_bytes=10, cores=8, verify=5)
    assert scheduler.Simulation([1000] * 40, setup).run().seconds == pytest.approx(
        40 * 1000 * 10 / (8 * 5), rel=1e-3
    )


def test_snakemakes_own_time_is_serial(scheduler: ModuleType) -> None:
    setup = scheduler.Setup(rate=1e9, dispatch=0.5, replicas=8, streams=32, cores=64)
    assert scheduler.Simulation(SHARDS, setup).run().seconds == pytest.approx(
        2 * len(SHARDS) * 0.5, rel=0.02
    )


def test_what_comes_before_the_first_shard_is_added(scheduler: ModuleType) -> None:
    outcome = scheduler.Simulation(
        [100], scheduler.Setup(rate=10, plan=3, start=20, job=1, dispatch=0.5, recaptures=0.1)
    ).run()
    # The extracting job starts while the server does.
    assert outcome.seconds == pytest.approx(3 + 20 + 11 + 0.5 + 1)


def test_a_failure_costs_what_it_lost_and_the_new_start(scheduler: ModuleType) -> None:
    setup = scheduler.Setup(rate=10, streams=2, start=7, failure=40)
    outcome = scheduler.Simulation([300] * 4, setup, seed=3).run()
    assert outcome.lost > 0
    assert outcome.seconds >= (1200 + outcome.lost) / 10 + 2 * 7 - 1e-6
    undisturbed = scheduler.Simulation([300] * 4, dataclasses.replace(setup, failure=inf)).run()
    assert undisturbed.seconds == pytest.approx(1200 / 10 + 7)
