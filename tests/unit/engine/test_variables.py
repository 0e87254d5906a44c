"""Environment variables of the server: the workflow's own, and those that change numbers."""

import pytest

from draftstates.engine import variables


@pytest.mark.parametrize(
    "name",
    ["DRAFTSTATES_CAPTURE", "DRAFTSTATES_ANY", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE"],
)
def test_the_workflows_own_variables_cannot_be_set(name: str) -> None:
    for problems in (variables.server_problems, variables.engine_problems):
        assert problems([name]) == [f"{name} is not accepted here: the workflow sets it"]


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
        "SGLANG_EXTERNAL_MODEL_PACKAGE",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    ],
)
def test_a_variable_that_changes_numbers_enters_the_key(name: str) -> None:
    (problem,) = variables.server_problems([name])
    assert "put it into model.engine_env, which enters the capture key" in problem
    assert variables.engine_problems([name]) == []
    assert variables.numeric({name: "1", "NCCL_DEBUG": "INFO"}) == {name: "1"}


@pytest.mark.parametrize(
    "name", ["NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "SGLANG_SET_CPU_AFFINITY", "OMP_NUM_THREADS"]
)
def test_other_variables_are_free_and_do_not_enter_the_key(name: str) -> None:
    assert variables.server_problems([name]) == []
    (problem,) = variables.engine_problems([name])
    assert "it changes no numbers; put it into server.env" in problem
