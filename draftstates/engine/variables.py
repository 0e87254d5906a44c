"""Environment variables of the server: those of the engine and its libraries that are known to
change no numbers, those that make a capture wrong, and the workflow's own.

A variable of the engine or of its libraries that is on no list counts as one that changes numbers:
it stands in `model.engine_env`, which enters the capture key, or the server is refused. The names
are those of SGLang 0.5.17 to 0.5.23, of its images and of what clusters set.
"""

import re
from collections.abc import Callable, Mapping

# Variables by which the workflow starts a server that captures, and that computes offline.
_OWN = re.compile(
    r"DRAFTSTATES_\w*|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TORCHDYNAMO_DISABLE|PYTHONPATH"
)
# The engine and the libraries that compute for it.
_LIBRARIES = re.compile(
    r"(SGLANG|SGL|DUMPER|ROCM|HIP|HIPBLAS\w*|ROCBLAS|MIOPEN|RCCL|TRTLLM|TLLM|TENSORRT|FLASHINFER"
    r"|FLASHMLA|FLASH_ATTENTION|VLLM|AITER\w*|FLYDSL|DG|DEEPGEMM|DEEPEP|DEEP_NORMAL_MODE|MORI"
    r"|TILELANG|CUTE|CUTLASS|TRITON|(PY)?TORCH\w*|CUBLAS\w*|CUDNN|NVIDIA_TF32|NVTE|NCCL|DNNL|ONEDNN"
    r"|MKL|CK|ASCEND_USE|MINIMAX|KT|LMCACHE|MOE|XFORMERS|USE_TRITON|USE_ROCM|ENABLE_JIT|LD)_\w+|IS_H200"
)
# Parts of names that speak of a number format or of accuracy: no pattern below forgives these.
_NUMBERS = re.compile(
    r"(?<![A-Z0-9])(BF16|FP?(4|8|16|32)|F32|INT[248]|TF32|[MN][XV]FP4|MXFP8|NVFP4|W[48]A(4|8|16)"
    r"|FP\d+\w*|\w*DTYPE|\w*QUANT\w*|DEQUANT|REQUANT|\w*PRECISION|DOWNCASTING|FPMATH\w*"
    r"|REDUCED\w*|ROUNDING|THRESHOLD_SCALE_FACTOR|COMPRESS\w*)(?![A-Z0-9])"
)
# What a name ends with that places a cache, waits, counts or writes a log, in any library.
_HARMLESS_ENDINGS = (
    r"\w*_(CACHE_(DIR|PATH|ROOT|HOME|KEEP|DEBUG|DISABLE)|DUMP_DIR|LOG_DIR|PROFILER_DIR"
    r"|COREDUMP\w*|LOG|LOGS|LOG_LEVEL|LOG_FILE|LOGGING\w*|VERBOSE|TIMEOUT|TIMEOUT_(S|MS|SEC|SECS)"
    r"|PORT|PORT_BASE|PORTS|IFNAME|HOST_IP|VERSION|HOME|ROOT_DIR|NUM_THREADS"
    r"|INTERVAL(_S|_SECS?|_SECONDS)?)"
)
_HARMLESS = (
    # SGLang: logs, traces and what ends a server
    "(SGLANG|SGL)_(LOG_.*|JIT_LOG_.*|TRACE_.*|OTLP_.*|PROFILE_.*|CUDA_COREDUMP.*|PYSPY_.*"
    "|ENABLE_METRICS_.*|ENABLE_NVTX_.*|RECORD_STEP_TIME|DETECT_SLOW_RANK|FORCE_SHUTDOWN"
    "|KILLPG_.*|IS_IN_CI|IS_IN_CI_AMD|RUN_ID|MEM_PROFILE_.*"
    # SGLang: processes, addresses and threads
    "|HOST_IP|PORT|TIMEOUT_KEEP_ALIVE|ZMQ_.*|GRPC_.*|UVICORN_.*|ENABLE_HEALTH_.*|USE_PICKLE_IPC"
    "|USE_MESSAGE_QUEUE_BROADCASTER|DISTRIBUTED_INIT_METHOD_OVERRIDE|SET_CPU_AFFINITY"
    "|CPU_OMP_THREADS_BIND|NUMA_BIND_V2|AUTO_NUMA_BIND|CRASH_ON_NUMA_BIND_FAILURE"
    "|ONE_VISIBLE_DEVICE_PER_PROCESS|BLOCK_NONZERO_RANK_CHILDREN|RAY_BUNDLE_INDICES"
    # SGLang: reading files and compiling beforehand; whether a library is found at all is as if
    # it were installed
    "|CACHE_DIR|PREFETCH_BLOCK_SIZE_MB|SORT_WEIGHT_FILES|JIT_DEEPGEMM_PRECOMPILE"
    "|JIT_DEEPGEMM_FAST_WARMUP|JIT_DEEPGEMM_COMPILE_WORKERS|IN_DEEPGEMM_PRECOMPILE_STAGE"
    "|DG_USE_NVRTC|SKIP_SGL_KERNEL_VERSION_CHECK|IS_FLASHINFER_AVAILABLE|FLASHINFER_WORKSPACE_SIZE"
    # SGLang: schedule and memory
    "|SCHEDULER_(?!SKIP_).*|PREFILL_DELAYER_.*|INIT_NEW_TOKEN_RATIO|MIN_NEW_TOKEN_RATIO_FACTOR"
    "|NEW_TOKEN_RATIO_DECAY_STEPS|RETRACT_DECODE_STEPS|TEST_RETRACT.*|CLIP_MAX_NEW_TOKENS.*"
    "|MAX_NEW_TOKENS_LIMIT|EMPTY_CACHE_INTERVAL|ENABLE_STRICT_MEM_CHECK.*"
    "|(EN|DIS)ABLE_TP_MEMORY_INBALANCE_CHECK|DISABLE_OUTLINES_DISK_CACHE|GRAMMAR_.*"
    # SGLang: rows whose log probabilities are computed at once, behind the states
    "|ENABLE_LOG(PROB|ITS_PROCESSER)_CHUNK|LOG(PROB|ITS_PROCESSER)_CHUNK_SIZE"
    "|PATCH_TOKENIZER|BATCH_TOKENIZER_OUTPUTS|PARALLEL_PROMPT_ENCODE.*)",
    # machines and images: versions, devices, wires
    "(NCCL|RCCL)_(DEBUG.*|VERSION|SOCKET_.*|IB_.*|NET|NET_.*|CROSS_NIC|P2P_.*|SHM_.*|CUMEM_.*"
    "|MNNVL_.*|ASYNC_.*|NSOCKS_.*|BUFFSIZE|IGNORE_CPU_AFFINITY|TOPO_.*|TUNER_.*|FASTRAK_.*"
    "|PXN_.*|OOB_.*|GPUDIRECTTCPX_.*|PROFILER_.*|RAS_.*|BLOCKING_WAIT|COMM_ID|SET_.*"
    "|NVLS_ENABLE|LAUNCH_.*|CHECKS_DISABLE|DMABUF_ENABLE|GDRCOPY_.*|NVLSTREE_.*|GIN_.*)",
    "PYTORCH_((CUDA_|HIP_)?ALLOC_CONF|BUILD_.*|NVML_BASED_CUDA_CHECK|NO_.*|KERNEL_CACHE_PATH)",
    "TORCH_(CUDA_ARCH_LIST|EXTENSIONS_DIR|NCCL_.*|CUDNN_V8_API_.*|SHOW_.*|CPP_LOG_LEVEL|FR_.*"
    "|DISTRIBUTED_DEBUG|USE_CUDA_DSA|TRACE|DEVICE_BACKEND_AUTOLOAD|WARN_ONCE|SYMBOLIZE_.*"
    "|FORCE_(NO_)?WEIGHTS_ONLY_LOAD|GLOO_.*)",
    "TORCHELASTIC_.*|TORCHINDUCTOR_COMPILE_THREADS",
    "CUBLAS_WORKSPACE_CONFIG|CUDNN_(INSTALL|LIB|INCLUDE|ROOT)\\w*",
    "TRITON_(.*PTXAS.*_PATH|.*_PATH|PRINT_AUTOTUNING|KERNEL_DUMP|DEBUG|STORE_BINARY_ONLY)",
    "FLASHINFER_(WORKSPACE_(BASE|DIR)|CUDA_ARCH_LIST|DISABLE_VERSION_CHECK|CUBIN_.*)",
    "ROCM_(PATH|HOME|DIR)|HIP_(VISIBLE_DEVICES|PATH|PLATFORM|COMPILER|CLANG_PATH|FORCE_DEV_KERNARG)",
    "MKL_(DYNAMIC|THREADING_LAYER|INTERFACE_LAYER|DOMAIN_NUM_THREADS)",
    "(DNNL|ONEDNN)_(JIT_DUMP|PRIMITIVE_CACHE_CAPACITY|JIT_PROFILE)",
    "LD_(LIBRARY_PATH|RUN_PATH|BIND_NOW)|CUTE_DSL_LOG_.*|DG_JIT_USE_NVRTC|TRTLLM_ENABLE_PDL|TLLM_LOG_.*|MOE_LOG_.*",
)
_CHANGES_NOTHING = re.compile("|".join((*_HARMLESS, _HARMLESS_ENDINGS)))
# These change no numbers though a word of their names could mean a number format.
_NAMED_HARMLESS = frozenset(("SGLANG_ENABLE_REQUEST_DECOMPRESSION",))

_PATCHES = "it changes the server's program or states while it runs"
_PACKAGE = (
    "it names code whose content the capture key does not cover: put the model's code into its"
    " folder, and use model.trust_remote_code"
)
_PRELOAD = "it loads other code into the server, which the capture key does not cover"
_REFUSED = (
    (re.compile(r"DUMPER_\w+|SGLANG_DEBUG_REVERT_PR|SGLANG_KV_CANARY_PERTURB_\w+"), _PATCHES),
    (re.compile(r"SGLANG_DEBUG_(HISPARSE_SKIP_IO|POISON_POOL)|SGLANG_TEST_SCRIPTED\w*"), _PATCHES),
    (re.compile(r"SGLANG_EXTERNAL_(MODEL|MM)_\w+|SGLANG_HTTP_SERVER_APP_PATH"), _PACKAGE),
    (
        re.compile(r"SGLANG_USE_MODELSCOPE"),
        "it takes models from elsewhere; name the model's folder in model.path",
    ),
    (re.compile(r"LD_(PRELOAD|AUDIT)"), _PRELOAD),
    (re.compile(r"TRITON_(KERNEL_OVERRIDE|OVERRIDE_DIR)"), _PRELOAD),
)
# Allocators and threads, which SGLang's images for CPUs preload, compute nothing.
_ALLOCATORS = re.compile(
    r"(\S*/)?lib(tcmalloc\w*|jemalloc|mimalloc|tbbmalloc\w*|iomp5|gomp)(-[0-9a-f]+)?\.so[.\d]*"
)
FILE = "its value names a file, whose content the capture key does not cover"
_FILE = re.compile(
    r"(^|[=,:;\"])(~|\.{0,2}/)|\.(json|ya?ml|toml|py|so|csv|txt|bin|pt|safetensors)$"
)


def is_own(name: str) -> bool:
    """Return whether the workflow itself sets a variable."""
    return _OWN.fullmatch(name) is not None


def changes_numbers(name: str) -> bool:
    """Return whether a variable can change the captured numbers: one of the engine or its
    libraries that is not known to be harmless."""
    if is_own(name) or name in _NAMED_HARMLESS or not _LIBRARIES.fullmatch(name):
        return False
    if any(names.fullmatch(name) for names, _ in _REFUSED):
        return True
    return _NUMBERS.search(name) is not None or _CHANGES_NOTHING.fullmatch(name) is None


def numeric(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change the captured numbers, by name; empty ones of the
    loader, and those that preload allocators only, are left out."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if changes_numbers(name) and not _is_allocator(name, value)
    }


def _is_allocator(name: str, value: str) -> bool:
    parts = re.split(r"[:\s]+", value)
    return name == "LD_PRELOAD" and all(not part or _ALLOCATORS.fullmatch(part) for part in parts)


def refusal(name: str, value: str) -> str | None:
    """Return why a variable can be in no environment of a server, or None."""
    for names, reason in _REFUSED:
        if names.fullmatch(name) and not _is_allocator(name, value):
            return reason
    if changes_numbers(name) and not _is_allocator(name, value) and names_a_file(value):
        return FILE
    return None


def names_a_file(value: str) -> bool:
    """Return whether a value of a variable or a flag names a file or a folder."""
    return _FILE.search(value) is not None


def server_problems(variables: Mapping[str, str]) -> list[str]:
    """Return why variables cannot be in `server.env`, a reason each."""
    belongs = (
        "it can change the captured numbers, as all of the engine's variables can but those that"
        " are known not to; put it into model.engine_env, which enters the capture key"
    )
    return _problems(
        variables, lambda name, value: belongs if name in numeric({name: value}) else None
    )


def engine_problems(variables: Mapping[str, str]) -> list[str]:
    """Return why variables cannot be in `model.engine_env`, a reason each."""
    return _problems(
        variables,
        lambda name, value: (
            None
            if name in numeric({name: value})
            else "it changes no numbers; put it into server.env"
        ),
    )


def _problems(
    variables: Mapping[str, str], misplaced: Callable[[str, str], str | None]
) -> list[str]:
    """Return a reason for each variable that is the workflow's own, refused, or misplaced."""
    reasons = {
        name: "the workflow sets it"
        if is_own(name)
        else refusal(name, value) or misplaced(name, value)
        for name, value in variables.items()
    }
    return [f"{name} is not accepted here: {reason}" for name, reason in reasons.items() if reason]
