"""The command that starts a server."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import capture_spec

from draftstates.capture.settings import ENVIRONMENT
from draftstates.config import Configuration, resolve
from draftstates.server.command import (
    generate_settings,
    on_gpu,
    server_settings,
    sglang_command,
)
from draftstates.server.gpus import visible_gpus

SPEC = capture_spec()


def configured(**server: Any) -> Configuration:
    raw = {
        "data": {"sources": [{"name": "none", "files": ["none"]}], "max_tokens": 2},
        "model": {"path": "m"},
        "capture": {"compute_dtype": "bfloat16"},
        "server": server,
    }
    return resolve(raw, origin="test")


def command(**server: Any) -> list[str]:
    return sglang_command(configured(**server), spec=SPEC)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("4, 5,-1,6", ["4", "5"]),
        ("GPU-8932f937-d72c,MIG-GPU-8932/1/0", ["GPU-8932f937-d72c", "MIG-GPU-8932/1/0"]),
    ],
)
def test_a_server_computes_on_the_gpus_that_cuda_shows_it(
    monkeypatch: pytest.MonkeyPatch, named: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("DRAFTSTATES_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("nvidia0"), Path("nvidia1")]))
    assert visible_gpus() == expected
    assert on_gpu(configured().server) == bool(expected)


def test_an_idle_server_sleeps() -> None:
    assert "--sleep-on-idle" in command()
    assert "--attn-dp-size" not in command()


def test_ranks_of_data_parallel_attention_do_not_sleep_since_they_wait_for_each_other() -> None:
    found = command(tensor_parallel=8, data_parallel_attention=4)
    assert found[found.index("--tensor-parallel-size") + 1] == "8"
    assert found[found.index("--attn-dp-size") + 1] == "4"
    assert "--sleep-on-idle" not in found


def test_the_radix_cache_is_off_but_for_prefixes_that_are_reused() -> None:
    """Then the self-test asks in namespaces of its own."""
    config = configured()
    reusing = config.model_copy(
        update={"capture": config.capture.model_copy(update={"reuse_prefixes": True})}
    )
    for settings, off in ((config, True), (reusing, False)):
        assert ("--disable-radix-cache" in sglang_command(settings, spec=SPEC)) == off
        found = server_settings(settings, spec=SPEC, plan=Path("plan.json"))
        assert ("--radix-cache" in found.selftest) != off


def test_what_the_key_names_reaches_the_server_and_what_the_workflow_sets_stays() -> None:
    key = {
        "engine_args": ("--kv-cache-dtype", "fp8_e4m3"),
        "engine_env": ("NVIDIA_TF32_OVERRIDE=0=x",),
    }
    spec = dataclasses.replace(SPEC, **key)
    config = configured(args=["--log-level", "debug"], env={"NCCL_DEBUG": "INFO"})
    found = sglang_command(config, spec=spec)
    assert found[-4:] == ["--kv-cache-dtype", "fp8_e4m3", "--log-level", "debug"]
    settings = server_settings(config, spec=spec, plan=Path("plan.json"))
    assert settings.env["NVIDIA_TF32_OVERRIDE"] == "0=x"
    assert settings.env["NCCL_DEBUG"] == "INFO"
    assert settings.env["HF_HUB_OFFLINE"] == "1"
    assert json.loads(settings.env[ENVIRONMENT])["spec"]["engine_args"] == [*spec.engine_args]


def test_a_server_that_answers_has_the_models_flags_and_nothing_of_the_capture() -> None:
    config = configured(args=["--log-level", "debug"], env={"NCCL_DEBUG": "INFO"}, device="cuda")
    config = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={
                    "engine_args": ["--kv-cache-dtype", "fp8_e4m3"],
                    "engine_env": {"NVIDIA_TF32_OVERRIDE": "0"},
                }
            )
        }
    )
    settings = generate_settings(config)
    assert settings.command[-4:] == ["--kv-cache-dtype", "fp8_e4m3", "--log-level", "debug"]
    assert "--skip-tokenizer-init" in settings.command
    assert not [flag for flag in settings.command if "radix" in flag or "cuda-graph" in flag]
    assert settings.selftest == []
    assert settings.env["NVIDIA_TF32_OVERRIDE"] == "0"
    assert settings.env["NCCL_DEBUG"] == "INFO"
    assert ENVIRONMENT not in settings.env
    captures = server_settings(config, spec=SPEC, plan=Path("plan.json"))
    assert (settings.kind, captures.kind) == ("generate", "capture")
    assert settings.fingerprint != captures.fingerprint
    assert settings.log != captures.log
