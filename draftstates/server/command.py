"""The settings and commands of the two kinds of server, from the configuration."""

import os
from pathlib import Path

from draftstates.capture.settings import CaptureSettings
from draftstates.config import Configuration, LeaseOptions, Server
from draftstates.containers import scratch, shown_to_server
from draftstates.paths import Results
from draftstates.server.gpus import visible_gpus
from draftstates.server.settings import ServerKind, ServerSettings
from draftstates.spec import CaptureSpec

CPU_FLAGS = ["--device", "cpu", "--attention-backend", "torch_native"]
CPU_FLAGS += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
# A prefix recapture asks for the next tokens of all its rows. SGLang computes so many rows at once;
# 2,048 rows, its default, took 6 GB more of a GPU with a vocabulary of 152,000.
_LOG_PROBABILITIES = {"SGLANG_LOGPROB_CHUNK_SIZE": "512"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
DEVICE_VARIABLE = "DRAFTSTATES_DEVICE"


def on_gpu(server: Server) -> bool:
    """Return whether the configured server computes on NVIDIA GPUs.

    `auto` looks for the GPUs that this process sees, without importing torch. A step in a container
    sees no GPUs and reads the variable DRAFTSTATES_DEVICE instead (`cuda` or `cpu`).
    """
    if server.device == "auto" and server.launcher == "local":
        device = os.environ.get(DEVICE_VARIABLE)
        return device == "cuda" if device else bool(visible_gpus())
    # a server job runs on another node than its clients
    return server.device != "cpu"


def attestation_path(config: Configuration) -> Path:
    """Return the path of the file that the running server's self-test writes."""
    return Results(config.results).attestation.resolve()


def server_settings(config: Configuration, *, spec: CaptureSpec, plan: Path) -> ServerSettings:
    """Return the settings of a server that captures, for a lease.

    They are the same for all jobs of a run, because these jobs share one server.

    Args:
        config: the resolved configuration.
        spec: the capture.
        plan: path of `plan.json`, from which the self-test reads the capture.
    """
    results = config.results.resolve()
    selftest = ["{python}", "-m", "draftstates.verify.selftest"]
    selftest += ["--address", "{address}", "--plan", str(plan.resolve())]
    selftest += ["--model", str(config.model.path.resolve()), "--root", str(results)]
    selftest += ["--parity-tokens", str(config.checks.parity_tokens)]
    selftest += ["--trust-remote-code"] if config.model.trust_remote_code else []
    selftest += ["--radix-cache"] if config.capture.reuse_prefixes else []
    selftest += ["--output", str(attestation_path(config))]
    return _settings(
        config,
        kind="capture",
        command=sglang_command(config, spec=spec),
        env=server_environment(config, spec=spec, root=results),
        selftest=selftest,
    )


def generate_settings(config: Configuration) -> ServerSettings:
    """Return the settings of a plain server, which answers prompts and captures nothing, for a
    lease.

    Requests and answers hold ids, as with a server that captures. It has no self-test: the lease
    begins when the server answers `GET /health`.

    Args:
        config: the resolved configuration.
    """
    chosen = config.model.engine_env
    command = _engine_command(config, dtype=config.capture.compute_dtype)
    return _settings(
        config,
        kind="generate",
        command=[*command, *config.model.engine_args, *config.server.args],
        env={**chosen, **_common_environment(config)},
        selftest=[],
    )


def _settings(
    config: Configuration,
    *,
    kind: ServerKind,
    command: list[str],
    env: dict[str, str],
    selftest: list[str],
) -> ServerSettings:
    server, image = config.server, config.containers.sglang
    log = Results(config.results).server_log.resolve()
    return ServerSettings(
        **{name: getattr(server, name) for name in LeaseOptions.model_fields},
        kind=kind,
        command=command,
        env={**server.env, **env},
        image=image.resolve() if image else None,
        image_args=_image_arguments(config),
        scratch=scratch(config),
        selftest=selftest,
        gpus_each=server.tensor_parallel if on_gpu(server) else 0,
        state=config.state_folder,
        log=log if kind == "capture" else log.with_name(f"{kind}.log"),
    )


def sglang_command(config: Configuration, *, spec: CaptureSpec) -> list[str]:
    """Return the argv of one server that captures.

    The launcher replaces `{host}`, `{port}` and `{key_config}` when it starts the server.
    """
    command = _engine_command(config, dtype=spec.compute_dtype)
    # Without the radix cache, SGLang skips no row. A replayed graph runs no Python, so a prefill in
    # a graph cannot be captured; graphs for decoding are not needed, because nothing is decoded.
    command += [] if config.capture.reuse_prefixes else ["--disable-radix-cache"]
    command += ["--cuda-graph-backend-prefill", "disabled"]
    command += ["--cuda-graph-backend-decode", "disabled"]
    return [*command, *spec.engine_args, *config.server.args]


def _engine_command(config: Configuration, *, dtype: str) -> list[str]:
    """Return the argv that servers of both kinds share."""
    command = ["{python}", "-m", "sglang.launch_server"]
    command += ["--host", "{host}", "--port", "{port}", "--config", "{key_config}"]
    command += ["--model-path", str(config.model.path.resolve()), "--dtype", dtype]
    command += ["--tensor-parallel-size", str(config.server.tensor_parallel)]
    # Requests and answers hold ids.
    command.append("--skip-tokenizer-init")
    if config.server.data_parallel_attention > 1:
        command += ["--attn-dp-size", str(config.server.data_parallel_attention)]
    else:
        # An idle scheduler would spin on a core. With data parallel attention, ranks wait for each
        # other, and a sleeping rank without a request would stop them.
        command.append("--sleep-on-idle")
    if config.model.trust_remote_code:
        command.append("--trust-remote-code")
    if not on_gpu(config.server):
        command += CPU_FLAGS
    return command


def _image_arguments(config: Configuration) -> list[str]:
    if not config.containers.sglang:
        return []
    shown = [argument for bind in shown_to_server(config) for argument in ("--bind", bind)]
    return [
        *(["--nv"] if on_gpu(config.server) else []),
        *shown,
        *config.containers.sglang_args,
    ]


def server_environment(config: Configuration, *, spec: CaptureSpec, root: Path) -> dict[str, str]:
    """Return the variables that make the server capture, with files only below `root`."""
    settings = CaptureSettings(
        root=root,
        spec=spec,
        queue_bytes=config.server.queue_bytes,
        writers=config.server.writers,
    )
    chosen = dict(variable.split("=", 1) for variable in spec.engine_env)
    own = {**_common_environment(config), **settings.to_environment()}
    return {**_LOG_PROBABILITIES, **chosen, **own}


def _common_environment(config: Configuration) -> dict[str, str]:
    """Return the variables that servers of both kinds share."""
    # compiling for a CPU takes longer than it saves
    cpu = {} if on_gpu(config.server) else {"TORCHDYNAMO_DISABLE": "1"}
    return {**_OFFLINE, **cpu}
