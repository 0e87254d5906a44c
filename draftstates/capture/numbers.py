"""The settings that decide a server's numbers: held to the capture key, and listed for the
attestation.

A local server, a Slurm job and a server of others are compared in the same way: by what SGLang was
given, and by what the rank that writes really holds.
"""

import hashlib
import json
import os
import re
import uuid
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from draftstates.capture import arguments
from draftstates.engine import flags, variables
from draftstates.model.folder import ModelFolder
from draftstates.spec import CaptureSpec

# Stands for the digest of a model whose weights a server makes up (`--load-format dummy`), for
# benchmarks.
MADE_UP = "made-up weights"
# Set by the first process of a server, and inherited by its ranks.
_GIVEN_VARIABLES = "DRAFTSTATES_GIVEN_VARIABLES"
_SERVER = "DRAFTSTATES_SERVER"
# Where a server's arguments keep what they were given, before SGLang resolves them in place.
_GIVEN = "_draftstates_given"
# Resolved arguments that choose a number format or an accuracy.
_FORMATS = (
    "quantization",
    "kv_cache_dtype",
    "model_impl",
    "load_format",
    # Code in the model's folder, which its digest covers, may be run or not: the self-test holds
    # it against model.trust_remote_code.
    "trust_remote_code",
    "torchao_config",
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
    "rl_on_policy_target",
    "enable_deterministic_inference",
    "enable_tf32_matmul",
    "enable_fp32_lm_head",
    "enable_quant_communications",
    "enable_w4a4_mxfp4_megamoe",
    "enable_deepseek_v4_fp4_indexer",
    "deepep_dispatcher_output_dtype",
    "flashinfer_mxfp4_moe_precision",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "mamba_ssm_dtype",
    "enable_int8_mamba_checkpoint",
    "enable_mamba_cache_stochastic_rounding",
    "triton_attention_reduce_in_fp32",
    "enable_lora",
)
# Resolved arguments that choose a kernel: they follow from the hardware, and change how results
# round. The attestation shows them.
_KERNELS = (
    "attention_backend",
    "prefill_attention_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "fp8_gemm_backend",
    "fp8_gemm_runner_backend",
    "fp4_gemm_backend",
    "bf16_gemm_backend",
    "linear_attn_backend",
    "mamba_backend",
    "page_size",
    "chunked_prefill_size",
    "tp_size",
    "attn_dp_size",
    "ep_size",
)
_PLUGINS = "sglang.srt.plugins"
# Keys of the model's configuration that SGLang sets from its arguments.
_FROM_ARGUMENTS = frozenset(
    (
        "_name_or_path",
        "transformers_version",
        "context_len",
        "encoder_only",
        "language_only",
        "language_model_only",
    )
)


class Refused(Exception):
    """A setting of the server that the capture key does not cover."""


def remember_start() -> None:
    """Note what the server was given, in its first process, before SGLang changes anything.

    The note is bound to that process: what a server of another process left in the environment is
    written over.
    """
    if _is_of_this_server(os.environ.get(_SERVER, "")):
        return
    pid = os.getpid()
    os.environ[_GIVEN_VARIABLES] = json.dumps(variables.numeric(os.environ), sort_keys=True)
    os.environ[_SERVER] = f"{pid}:{_parent_and_start(pid)[1]}:{uuid.uuid4().hex}"


def _is_of_this_server(note: str) -> bool:
    """Return whether a note was written by this process, or by one that it descends from.

    Args:
        note: `<pid>:<start time in clock ticks>:<name>`, or any other text.
    """
    if not re.fullmatch(r"\d+:\d+:[0-9a-f]{32}", note) or _GIVEN_VARIABLES not in os.environ:
        return False
    first, started = map(int, note.split(":")[:2])
    pid = os.getpid()
    while pid:
        try:
            parent, start = _parent_and_start(pid)
        except OSError:
            # a process that ended meanwhile, or of another user
            return False
        if (pid, start) == (first, started):
            return True
        pid = parent
    return False


def _parent_and_start(pid: int) -> tuple[int, int]:
    """Return a process's parent and start time, which tells it from others with its number."""
    # the name in parentheses may contain any character
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[1]), int(fields[19])


def server_name() -> str:
    """Return a name that all ranks of this server share, and no other server."""
    return os.environ[_SERVER].rsplit(":", 1)[-1]


def remember_arguments(asked: Any) -> None:
    """Note the arguments as given, where SGLang resolves them in place (0.5.17).

    Call it before SGLang's `ServerArgs.__post_init__`.
    """
    setattr(asked, _GIVEN, dict(vars(asked)))


def check(server_args: Any, model_config: Any, *, spec: CaptureSpec) -> str:
    """Hold a server to the capture key before it loads the model; return what it computes with.

    Args:
        server_args: SGLang's `ServerArgs`.
        model_config: SGLang's `ModelConfig` of the runner.

    Raises:
        Refused: names the setting, and where it belongs.
    """
    check_arguments(server_args, spec=spec)
    check_variables(spec=spec)
    compared = check_configuration(server_args, model_config)
    if resolved(server_args).get("enable_decoder_swa_bounded_replay"):
        raise Refused(
            "it leaves all but the last rows of a request uncomputed"
            " (enable_decoder_swa_bounded_replay); put --no-enable-decoder-swa-bounded-replay into"
            " model.engine_args"
        )
    return compared


def check_arguments(server_args: Any, *, spec: CaptureSpec) -> None:
    """Compare the arguments that a server was given with those that the capture key names.

    Raises:
        Refused: an argument that changes numbers is not its default and not in the key, or is in
            the key and not the server's.
    """
    given = getattr(server_args, _GIVEN, None)
    if given is None and not hasattr(server_args, "resolve_once"):
        raise Refused(
            "its arguments are resolved, and what they were is not known; start it by"
            " `python -m sglang.launch_server`, which loads plug-ins first"
        )
    declared = vars(arguments.parse(spec.engine_args))
    for field, names in arguments.names().items():
        found = given.get(field) if given is not None else getattr(server_args, field, None)
        expected = declared.get(field)
        known = not names or any(flags.is_checked_elsewhere(name) for name in names)
        if known or found == expected or _is_platforms(field, found, server_args):
            continue
        if field == "load_format" and found == "dummy" and spec.model_digest == MADE_UP:
            continue
        name = names[0]
        reason = flags.refusal(name)
        raise Refused(
            f"it was started with {name} {found}, expected {expected}: "
            + (reason or f"put {name} into model.engine_args, which enter the capture key")
        )


def _is_platforms(field: str, found: object, server_args: Any) -> bool:
    """Return whether a value is the one that our platform for any CPU needs."""
    on_cpu = getattr(server_args, "device", None) == "cpu"
    return on_cpu and (field, found) == ("attention_backend", "torch_native")


def check_variables(*, spec: CaptureSpec) -> None:
    """Compare the numeric variables that the server was given with those in the capture key.

    Raises:
        Refused: names the variable.
    """
    declared = dict(variable.split("=", 1) for variable in spec.engine_env)
    given = json.loads(os.environ[_GIVEN_VARIABLES])
    for name in sorted({*declared, *given}):
        if reason := variables.refusal(name, given.get(name, declared.get(name))):
            raise Refused(f"its environment has {name}={given.get(name)}: {reason}")
        if declared.get(name) != given.get(name):
            raise Refused(
                f"its environment has {name}={given.get(name)}, expected {declared.get(name)}: put"
                " it into model.engine_env, which enters the capture key, or remove it"
            )


def check_configuration(server_args: Any, model_config: Any) -> str:
    """Compare the configuration that the runner holds with the model's own `config.json`.

    Returns:
        how many keys were equal, and a hash of them.

    Raises:
        Refused: names the first key that differs.
    """
    own = own_configuration(server_args, model_config)
    held = model_config.hf_config.to_dict()
    keys = sorted({*own, *held} - _FROM_ARGUMENTS)
    for key in keys:
        if _plain(own.get(key)) != _plain(held.get(key)):
            raise Refused(
                f"it computes with {key}: {_short(held.get(key))}, but config.json of"
                f" {server_args.model_path} gives {_short(own.get(key))}; change the model's"
                " config.json instead, which the capture key covers"
            )
    digest = hashlib.sha256(_plain({key: held.get(key) for key in keys}).encode()).hexdigest()
    return f"{len(keys)} keys as in the model's, sha256 {digest[:16]}"


def own_configuration(server_args: Any, model_config: Any) -> dict[str, Any]:
    """Return what SGLang makes of the model's `config.json` when nothing overrides it."""
    own = type(model_config)(
        model_path=server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        context_length=server_args.context_length,
        enable_multimodal=server_args.enable_multimodal,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization,
    )
    return own.hf_config.to_dict()


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: object) -> str:
    text = _plain(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def resolved(server_args: Any) -> dict[str, Any]:
    """Return the arguments as SGLang resolved them."""
    read = getattr(server_args, "resolved_dict", None)
    return read() if read else vars(server_args)


def settings(runner: Any, *, spec: CaptureSpec, compared: str) -> dict[str, dict[str, str]]:
    """Return the settings of this rank that decide numbers, as text.

    Args:
        compared: what `check` said of the configuration before the model was loaded.

    Returns:
        under `numbers` what servers of one capture key must agree in; under `kernels` what follows
        from the hardware.
    """
    values = resolved(runner.server_args)
    matmul = torch.backends.cuda.matmul
    numbers = {
        "compute_dtype": runner.model_config.dtype,
        "kv_cache_dtype": runner.kv_cache_dtype,
        "quantization": runner.model_config.quantization,
        "weight_dtypes": sorted({str(weight.dtype) for weight in runner.model.parameters()}),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_allow_tf32": matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "bfloat16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "float16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "engine_args": list(spec.engine_args),
        "engine_env": list(spec.engine_env),
    }
    numbers |= {name: values[name] for name in _FORMATS if name in values and name not in numbers}
    if not ModelFolder(Path(runner.server_args.model_path)).code:
        # there is no code that may be run or not
        numbers.pop("trust_remote_code", None)
    kernels = {name: values[name] for name in _KERNELS if name in values}
    # Its keys differ between versions of transformers, which all hold the file's values.
    kernels["config.json"] = compared
    kernels["plugins"] = sorted(each.name for each in entry_points(group=_PLUGINS))
    kernels["model_class"] = f"{type(runner.model).__module__}.{type(runner.model).__qualname__}"
    return {
        "numbers": {name: _text(value) for name, value in numbers.items()},
        "kernels": {name: _text(value) for name, value in kernels.items()},
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value).replace("torch.", "")
