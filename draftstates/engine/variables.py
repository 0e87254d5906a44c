"""Environment variables of the server: the workflow's own, and those that change numbers."""

import re
from collections.abc import Iterable, Mapping

# Variables by which the workflow starts a server that captures, and that computes offline.
_OWN = re.compile(
    r"DRAFTSTATES_\w*|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TORCHDYNAMO_DISABLE|PYTHONPATH"
)
# Libraries whose variables can choose a number format, an algorithm with another accuracy, or
# another model file.
_LIBRARIES = re.compile(
    r"(SGLANG|SGL|FLASHINFER|VLLM|DG|DEEPGEMM|TRITON|TORCH|TORCHINDUCTOR|CUBLAS\w*|CUDNN|NVIDIA"
    r"|DNNL|ONEDNN|MKL|AITER|KT|LMCACHE)_\w+"
)
# Parts of names that speak of a number format or of accuracy.
_NUMBERS = re.compile(
    r"(?<![A-Z0-9])(BF16|FP?(4|8|16|32)|F32|INT[248]|TF32|[MN][XV]FP4|MXFP8|NVFP4|W[48]A(4|8|16)"
    r"|FP\d+\w*|\w*DTYPE|\w*QUANT\w*|DEQUANT|REQUANT|\w*PRECISION|DOWNCASTING|FPMATH\w*"
    r"|REDUCED\w*|ROUNDING|THRESHOLD_SCALE_FACTOR|COMPRESS\w*|DUMPER\w*)(?![A-Z0-9])"
)
# Variables that change numbers, though their names do not say so.
_ALSO = frozenset(
    (
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "SGLANG_EXTERNAL_MODEL_PACKAGE",
        "SGLANG_EXTERNAL_MM_MODEL_ARCH",
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE",
        "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS",
        "SGLANG_FORCE_FP8_MARLIN",
        "SGLANG_CPU_QUANTIZATION",
        "SGLANG_USE_MODELSCOPE",
    )
)


def is_own(name: str) -> bool:
    """Return whether the workflow itself sets a variable."""
    return _OWN.fullmatch(name) is not None


def changes_numbers(name: str) -> bool:
    """Return whether a variable can change the captured numbers."""
    return name in _ALSO or (
        _LIBRARIES.fullmatch(name) is not None and _NUMBERS.search(name) is not None
    )


def numeric(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change the captured numbers, by name."""
    return {name: value for name, value in sorted(variables.items()) if changes_numbers(name)}


def server_problems(names: Iterable[str]) -> list[str]:
    """Return why variables cannot be in `server.env`, a reason each."""
    return [
        f"{name} is not accepted here: the workflow sets it"
        if is_own(name)
        else f"{name} is not accepted here: it can change the captured numbers; put it into"
        " model.engine_env, which enters the capture key"
        for name in names
        if is_own(name) or changes_numbers(name)
    ]


def engine_problems(names: Iterable[str]) -> list[str]:
    """Return why variables cannot be in `model.engine_env`, a reason each."""
    return [
        f"{name} is not accepted here: the workflow sets it"
        if is_own(name)
        else f"{name} is not accepted here: it changes no numbers; put it into server.env"
        for name in names
        if is_own(name) or not changes_numbers(name)
    ]
