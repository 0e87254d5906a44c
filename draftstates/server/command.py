"""The command of an instrumented SGLang server, made from the configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstates.capture.settings import CaptureSettings
from draftstates.capture_spec import CaptureSpec
from draftstates.config import state_folder
from draftstates.containers import scratch, shown_to_server
from draftstates.server.settings import ServerSettings, SlurmSettings

_CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


DEVICE_VARIABLE = "DRAFTSTATES_DEVICE"


def on_gpu(server: Mapping[str, Any]) -> bool:
    """Whether the configured server computes on NVIDIA GPUs; `auto` looks at this machine, without importing torch.

    A step in a container sees no GPUs, so it is told by DRAFTSTATES_DEVICE (`cuda` or `cpu`).
    """
    if server["device"] == "auto" and server["launcher"] == "local":
        told = os.environ.get(DEVICE_VARIABLE)
        return told == "cuda" if told else any(Path("/dev").glob("nvidia[0-9]*"))
    return server["device"] != "cpu"  # a server job runs on another node than those that ask for it


def attestation_path(config: Mapping[str, Any]) -> Path:
    """Where the self-test of the server that runs now writes what it found."""
    return (Path(config["results"]) / ".server" / "attestation.json").resolve()


def server_settings(config: Mapping[str, Any], *, spec: CaptureSpec, plan: Path) -> ServerSettings:
    """Settings of the lease for a resolved configuration: the same for all jobs of a run, which share one server.

    Args:
        plan: the self-test reads the capture from it.
    """
    server, results = config["server"], Path(config["results"]).resolve()
    selftest = [
        *("{python}", "-m", "draftstates.server.selftest", "--address", "{address}", "--plan", str(plan.resolve())),
        *("--model", str(Path(config["model"]["path"]).resolve()), "--root", str(results), "--output", str(attestation_path(config))),
    ]
    return ServerSettings(
        launcher=server["launcher"],
        command=sglang_command(config, spec=spec),
        env={**server_environment(config, spec=spec, root=results), **server["env"]},
        image=Path(config["containers"]["sglang"]).resolve() if config["containers"]["sglang"] else None,
        image_args=_image_arguments(config),
        scratch=scratch(config),
        url=server["url"],
        api_key_file=Path(server["api_key_file"]) if server["api_key_file"] else None,
        selftest=selftest,
        replicas=server["replicas"],
        gpus_each=server["tensor_parallel"] if on_gpu(server) else 0,
        restarts=server["restarts"],
        slurm=SlurmSettings(**server["slurm"]),
        start_seconds=server["start_seconds"],
        idle_seconds=server["idle_seconds"],
        stop_seconds=server["stop_seconds"],
        state=state_folder(config),
        log=(results / ".server" / "server.log").resolve(),
    )


def sglang_command(config: Mapping[str, Any], *, spec: CaptureSpec) -> list[str]:
    """argv of one server; `{host}`, `{port}` and `{key_config}` are filled in where it starts."""
    command = ["{python}", "-m", "sglang.launch_server", "--host", "{host}", "--port", "{port}", "--config", "{key_config}"]
    command += ["--model-path", str(Path(config["model"]["path"]).resolve()), "--dtype", spec.compute_dtype]
    command += ["--tensor-parallel-size", str(config["server"]["tensor_parallel"])]
    # without the cache no row can be skipped; ids go in and out, so no tokenizer is needed;
    # a replayed graph runs no Python, so nothing could be captured from a prefill under one, and nothing is decoded
    command += ["--disable-radix-cache", "--skip-tokenizer-init", "--cuda-graph-backend-prefill", "disabled"]
    command += ["--cuda-graph-backend-decode", "disabled"]
    if config["server"]["data_parallel_attention"] > 1:
        command += ["--attn-dp-size", str(config["server"]["data_parallel_attention"])]
    else:
        # an idle scheduler would spin on a core; not above, where ranks wait for each other and one without a request would sleep on
        command.append("--sleep-on-idle")
    if config["model"]["trust_remote_code"]:
        command.append("--trust-remote-code")
    if not on_gpu(config["server"]):
        command += _CPU
    return command + config["server"]["args"]


def _image_arguments(config: Mapping[str, Any]) -> list[str]:
    if not config["containers"]["sglang"]:
        return []
    shown = [argument for bind in shown_to_server(config) for argument in ("--bind", bind)]
    return [*(["--nv"] if on_gpu(config["server"]) else []), *shown, *config["containers"]["sglang_args"]]


def server_environment(config: Mapping[str, Any], *, spec: CaptureSpec, root: Path) -> dict[str, str]:
    """Variables that make the server capture, below `root` alone."""
    queue = {name: config["server"][name] for name in ("queue_bytes", "writers")}
    settings = CaptureSettings(root=root, spec=spec, **queue)
    environment = {**_OFFLINE, **settings.to_environment()}
    if not on_gpu(config["server"]):
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes longer than it saves
    return environment
