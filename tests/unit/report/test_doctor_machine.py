"""What a machine lacks for a configuration is named, and what will be the limit, for how long."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from synthetic import capture_spec, planned_shard

from draftstates import config
from draftstates.config import Configuration
from draftstates.paths import Results
from draftstates.report import doctor_machine
from draftstates.report.doctor_machine import Work, compare, forecast
from draftstates.report.machine import Gpu, Machine, look

GPU = Gpu(name="NVIDIA H200", memory=140 << 30, driver="570.86.15")
ROOMY = Machine(
    gpus=(GPU,) * 8,
    cuda="12.8",
    disk_free=10**13,
    write_rate=1.4e9,
    memory_free=512 << 30,
    open_files=1 << 20,
    file_bytes=None,
    versions={"snakemake": "9", "sglang": "0.5", "torch": "2", "transformers": "5"},
    slurm="slurm 24.05",
    apptainer="apptainer version 1.3.4-1",
)
# four states of 4,096 numbers in 16 bits
WORK = Work(
    spec=capture_spec(layers=(2, 18, 33), num_layers=36, hidden_size=4096),
    weight_bytes=16 << 30,
    tokens=10**8,
    bytes=33 * 10**11,
)


def configured(folder: Path, **sections: Any) -> Configuration:
    raw = {
        "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8},
        "model": {"path": "models/m"},
        "capture": {},
        "results": str(folder / "results"),
        **sections,
    }
    raw["server"] = {"device": "cuda", **sections.get("server", {})}
    return config.resolve(raw, origin="test")


def short(machine: Machine, configuration: Configuration, work: Work = WORK) -> set[str]:
    checks = compare(machine, configuration, work)
    assert all(bool(check.change) == (check.verdict != "enough") for check in checks)
    return {check.name for check in checks if check.verdict == "short"}


def test_a_roomy_machine_lacks_nothing(tmp_path: Path) -> None:
    assert short(ROOMY, configured(tmp_path)) == set()


@pytest.mark.parametrize(
    ("lack", "name"),
    [
        ({"gpus": ()}, "GPUs"),
        ({"gpus": (dataclasses.replace(GPU, memory=16 << 30),)}, "GPU memory"),
        ({"gpus": (dataclasses.replace(GPU, driver="470.1"),)}, "driver"),
        ({"cuda": None}, "driver"),
        ({"disk_free": 10**12}, "disk"),
        ({"write_rate": None}, "write rate"),
        ({"memory_free": 1 << 30}, "memory"),
        ({"open_files": 1024}, "ulimit"),
        ({"file_bytes": 1 << 30}, "ulimit"),
        ({"versions": {"snakemake": "9"}}, "versions"),
    ],
)
def test_what_a_machine_lacks_is_named(tmp_path: Path, lack: dict[str, Any], name: str) -> None:
    machine = dataclasses.replace(ROOMY, **lack)
    assert short(machine, configured(tmp_path)) == {name}
    checks = compare(machine, configured(tmp_path), WORK)
    said = forecast(machine, configured(tmp_path), WORK, checks)
    assert said.seconds is None
    assert said.limit.startswith(f"It cannot run here as configured. {name}: ")


def test_a_server_of_more_gpus_and_the_weights_are_divided(tmp_path: Path) -> None:
    work = dataclasses.replace(WORK, weight_bytes=900 << 30)
    assert short(ROOMY, configured(tmp_path), work) == {"GPU memory"}
    assert short(ROOMY, configured(tmp_path, server={"tensor_parallel": 8}), work) == set()
    assert short(ROOMY, configured(tmp_path, server={"replicas": 9})) == {"GPUs"}


def test_slurm_and_apptainer_are_asked_for_where_they_are_configured(tmp_path: Path) -> None:
    bare = dataclasses.replace(ROOMY, slurm=None, apptainer=None, gpus=())
    slurm = configured(tmp_path, server={"launcher": "slurm"})
    assert short(bare, slurm) == {"Slurm"}
    image = configured(tmp_path, containers={"sglang": "envs/a.sif"})
    assert short(dataclasses.replace(bare, gpus=ROOMY.gpus), image) == {"Apptainer"}
    old = dataclasses.replace(ROOMY, apptainer="apptainer version 1.1.9")
    assert short(old, image) == {"Apptainer"}
    assert short(ROOMY, image) == set()


def test_a_server_on_the_cpu_needs_memory_for_its_weights(tmp_path: Path) -> None:
    cpu = configured(tmp_path, server={"device": "cpu"})
    little = dataclasses.replace(ROOMY, memory_free=10 << 30, gpus=())
    assert short(little, cpu) == {"memory"}
    assert short(dataclasses.replace(little, memory_free=20 << 30), cpu) == set()


@pytest.mark.parametrize(
    ("rate", "limit", "seconds"),
    [
        (30_000, "The server will be the limit: 30,000 tokens/s", 10**8 / 30_000),
        (100_000, "The disk will be the limit: it takes 42,718 tokens/s", 10**8 / 42_718.1),
        (None, "the server's rate is unknown: set extract.tokens_per_second", 10**8 / 42_718.1),
    ],
)
def test_the_slower_of_server_and_disk_is_the_limit(
    tmp_path: Path, rate: int | None, limit: str, seconds: float
) -> None:
    configuration = configured(tmp_path, extract={"tokens_per_second": rate})
    said = forecast(ROOMY, configuration, WORK, compare(ROOMY, configuration, WORK))
    assert limit in said.limit
    assert said.seconds == pytest.approx(seconds, rel=1e-4)
    done = dataclasses.replace(WORK, tokens=0, bytes=0)
    said = forecast(ROOMY, configuration, done, compare(ROOMY, configuration, done))
    assert (said.limit, said.seconds) == ("Nothing is left to capture.", 0)
    unplanned = dataclasses.replace(WORK, tokens=None, bytes=None)
    checks = compare(ROOMY, configuration, unplanned)
    assert {check.name: check.verdict for check in checks}["disk"] == "unknown"
    said = forecast(ROOMY, configuration, unplanned, checks)
    assert (said.seconds, "How many tokens there are is unknown yet." in said.limit) == (None, True)


def test_this_machine_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftstates.report.machine._WRITE_SECONDS", 0.05)
    found = look(tmp_path / "results" / "of" / "a" / "run")
    assert found.disk_free > 0
    assert found.write_rate
    assert found.memory_free > 1 << 20
    assert found.open_files > 0
    assert found.versions.keys() >= {"torch", "snakemake"}
    assert list(tmp_path.iterdir()) == []
    assert look(Path("/proc")).write_rate is None


def test_nvidia_smi_is_read_as_it_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("draftstates.report.machine._WRITE_SECONDS", 0.0)
    assert look(tmp_path).gpus == (
        Gpu(name="NVIDIA H200", memory=143771 << 20, driver="570.86.15"),
    )


def test_the_plan_says_what_is_left(tmp_path: Path) -> None:
    from captured import tiny_model
    from results_tree import make_results

    plan = make_results(tmp_path / "results")
    model = tiny_model(tmp_path / "model")
    configuration = configured(
        tmp_path,
        model={"path": str(model), "name": plan.capture.model},
        capture={
            "residual_layers": list(plan.capture.residual_layers),
            "stored_dtype": plan.capture.stored_dtype,
        },
    )
    work = doctor_machine.asked(configuration)
    assert (work.tokens, work.bytes) == (0, 0)
    assert work.spec.token_bytes == plan.capture.token_bytes
    more = planned_shard("f" * 32, tokens=700, bytes=9000)
    dataclasses.replace(plan, shards=(*plan.shards, more)).publish(
        Results(tmp_path / "results").plan
    )
    work = doctor_machine.asked(configuration)
    assert (work.tokens, work.bytes) == (700, 9000)
    other = configuration.model_copy(
        update={"model": configuration.model.model_copy(update={"name": "other"})}
    )
    assert doctor_machine.asked(other).tokens is None
