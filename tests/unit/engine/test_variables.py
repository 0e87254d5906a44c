"""Environment variables of the server: the workflow's own, and those that change numbers."""

import pytest

from draftstates.engine import variables


@pytest.mark.parametrize(
    "name",
    ["DRAFTSTATES_CAPTURE", "DRAFTSTATES_ANY", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE"],
)
def test_the_workflows_own_variables_cannot_be_set(name: str) -> None:
    for problems in (variables.server_problems, variables.engine_problems):
        assert problems({name: "1"}) == [f"{name} is not accepted here: the workflow sets it"]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "SGLANG_MAMBA_SSM_DTYPE",
        "SGLANG_CPU_QUANTIZATION",
        "SGLANG_FP8_IGNORED_LAYERS",
        "SGLANG_ENABLE_DP_GATHER_FP8",
        "SGLANG_USE_SAGE_ATTENTION_IMPL",
        "SGLANG_MINICPM_FORCE_DENSE",
        "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ",
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
        "SGLANG_ROPE_CACHE_FP32",
        "SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE",
        "SGLANG_DISABLED_MODEL_ARCHS",
        "SGLANG_PLUGINS",
        "SGLANG_OF_TOMORROW",
        "SGL_OF_YESTERDAY",
        "ROCM_QUICK_REDUCE_QUANTIZATION",
        "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
        "VLLM_MARLIN_USE_ATOMIC_ADD",
        "AITER_FORCE_A8W4",
        "CK_MOE",
        "MINIMAX_NPU_PREFILL_BSQ",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "NCCL_ALGO",
        "TRITON_INTERPRET",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    ],
)
def test_a_variable_that_changes_numbers_enters_the_key(name: str) -> None:
    (problem,) = variables.server_problems({name: "1"})
    assert "put it into model.engine_env, which enters the capture key" in problem
    assert variables.engine_problems({name: "1"}) == []
    assert variables.numeric({name: "1", "NCCL_DEBUG": "INFO"}) == {name: "1"}


# What this project's launchers, tests and benchmarks set, and images and clusters.
FREE = """
    CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_VERSION CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS
    MKL_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_DEBUG NCCL_VERSION NCCL_IB_HCA
    NCCL_P2P_LEVEL NCCL_NVLS_ENABLE SGLANG_HOST_IP SGLANG_IS_FLASHINFER_AVAILABLE
    SGLANG_SET_CPU_AFFINITY SGLANG_CPU_OMP_THREADS_BIND SGLANG_PYSPY_DUMP_BEFORE_CRASH
    SGLANG_CUDA_COREDUMP_BEFORE_CRASH SGLANG_TEST_RETRACT SGLANG_TEST_RETRACT_INTERVAL
    SGLANG_WARMUP_TIMEOUT SGLANG_LOG_MS SGLANG_PORT SGLANG_CACHE_DIR SGLANG_DG_CACHE_DIR
    SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_ENABLE_REQUEST_DECOMPRESSION TVM_FFI_CACHE_DIR
    TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TILELANG_CACHE_DIR FLASHINFER_WORKSPACE_BASE
    DG_JIT_CACHE_DIR NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_REQUIRE_CUDA
    NVIDIA_PYTORCH_VERSION PYTORCH_HOME PYTORCH_VERSION PYTORCH_BUILD_NUMBER CUDNN_VERSION
    CUBLAS_VERSION TENSORRT_VERSION TORCH_CUDA_ARCH_LIST TORCH_HOME
    TORCH_NCCL_USE_COMM_NONBLOCKING PYTORCH_CUDA_ALLOC_CONF TRITON_PTXAS_PATH ROCM_PATH
    SGLANG_ENABLE_LOGPROB_CHUNK SGLANG_LOGPROB_CHUNK_SIZE SGLANG_LOGITS_PROCESSER_CHUNK_SIZE
    HIP_VISIBLE_DEVICES LD_LIBRARY_PATH HF_HOME TOKENIZERS_PARALLELISM SLURM_JOB_ID PATH HOME
"""


@pytest.mark.parametrize("name", FREE.split())
def test_other_variables_are_free_and_do_not_enter_the_key(name: str) -> None:
    assert variables.server_problems({name: "1"}) == []
    assert variables.numeric({name: "/a/path"}) == {}
    (problem,) = variables.engine_problems({name: "1"})
    assert "it changes no numbers; put it into server.env" in problem


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("DUMPER_SOURCE_PATCHER_CONFIG", "x", "changes the server's program"),
        # it ends like a harmless one
        ("DUMPER_SERVER_PORT", "1", "changes the server's program"),
        ("SGLANG_DEBUG_REVERT_PR", "1", "changes the server's program"),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine", "names code whose content"),
        ("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "mine", "names code whose content"),
        ("SGLANG_USE_MODELSCOPE", "1", "name the model's folder in model.path"),
        ("LD_PRELOAD", "/lib/mine.so", "loads other code into the server"),
        ("LD_PRELOAD", "/lib/libjemalloc.so.2:/lib/mine.so", "loads other code into the server"),
        ("LD_AUDIT", "mine.so", "loads other code into the server"),
        ("AITER_CONFIG_GEMM_A4W4", "/tuned", "names a file, whose content"),
        ("SGLANG_HUMMING_INPUT_QUANT_CONFIG", "quant.json", "names a file, whose content"),
        ("SGLANG_OF_TOMORROW", "a=1,b=../x", "names a file, whose content"),
    ],
)
def test_what_patches_a_server_or_names_code_is_refused_everywhere(
    name: str, value: str, reason: str
) -> None:
    for problems in (variables.server_problems, variables.engine_problems):
        (problem,) = problems({name: value})
        assert problem.startswith(f"{name} is not accepted here: ")
        assert reason in problem
    # so that a server of others is asked about it
    assert variables.numeric({name: value}) == {name: value}


@pytest.mark.parametrize(
    "value", ["", "/usr/lib/libtcmalloc_minimal.so.4", "/a/libiomp5.so:/b/libjemalloc.so.2"]
)
def test_preloaded_allocators_are_free(value: str) -> None:
    assert variables.server_problems({"LD_PRELOAD": value}) == []
    assert variables.numeric({"LD_PRELOAD": value}) == {}
