"""Servers that cannot be captured, or that differ from the plan: they do not start.

The error names the reason.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from server_harness import run_python, serve, spec_for
from synthetic import capture_spec

from draftstates.capture.plugin import check_loaded_model
from draftstates.capture.settings import CaptureSettings

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    ("seam", "named"),
    [
        ("sglang.srt.layers.logits_processor.LogitsProcessor.forward", "has no aux_hidden_states"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", "is not there"),
        ("sglang.srt.model_executor.forward_batch_info.ForwardBatch", "has no rids"),
    ],
)
def test_where_a_seam_has_moved_the_plugin_refuses_and_names_it(seam: str, named: str) -> None:
    """A process of its own imports SGLang as installed, with one name removed or changed."""
    owner, name = seam.rsplit(".", 1)
    change = {
        "has no aux_hidden_states": (
            "parent.forward = lambda self, input_ids, hidden_states, lm_head, logits_metadata: None"
        ),
        "is not there": f"del parent.{name}",
        "has no rids": f"del parent.{name}.__dataclass_fields__['rids']",
    }[named]
    code = f"""
import pkgutil
parent = pkgutil.resolve_name('{owner}')
{change}
from draftstates.capture.plugin import register
register()
"""
    done = run_python(
        code, **CaptureSettings(root=Path("/tmp"), spec=capture_spec()).to_environment()
    )
    assert done.returncode != 0
    assert "draftstates: cannot capture with sglang" in done.stderr
    assert seam in done.stderr
    assert named in done.stderr


@pytest.mark.parametrize(
    ("backend", "refused"), [("breakable", True), ("full", True), ("disabled", False)]
)
def test_where_prefill_graphs_are_on_the_plugin_refuses(backend: str, refused: bool) -> None:
    """The test replaces SGLang's parsed arguments: on a CPU SGLang turns graphs off by itself.

    tests/gpu starts a server with graphs on a GPU.
    """
    code = f"""
from types import SimpleNamespace as Space
from sglang.srt.model_executor import cuda_graph_config as graphs
prefill = graphs.PhaseConfig(backend='{backend}')
planted = Space(graph=Space(cuda_graph_config=graphs.CudaGraphConfig(prefill=prefill)))
graphs.get_exec = lambda: planted
from draftstates.capture.plugin import check_server
check_server(dp_size=1, nodes=1)
"""
    done = run_python(code)
    assert (done.returncode != 0) == refused
    assert ("add --cuda-graph-backend-prefill disabled" in done.stderr) == refused


def test_ranks_on_several_nodes_are_refused() -> None:
    done = run_python(
        "from draftstates.capture.plugin import check_server; check_server(dp_size=2, nodes=2)"
    )
    assert done.returncode != 0
    assert "draftstates: cannot capture with sglang" in done.stderr
    assert "on several nodes" in done.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_path": "models/of-others"}, "models/of-others: expected weights"),
        ({"load_format": "dummy"}, "holds made-up weights, but the capture is of content-"),
        ({"dtype": torch.float16}, "it computes in torch.float16, but the capture is of float32"),
        ({"quantization": "fp8"}, "it quantises the model (fp8)"),
        ({}, None),
    ],
)
def test_a_server_that_holds_another_model_or_computes_otherwise_is_refused(
    tmp_path: Path, changes: dict, named: str | None
) -> None:
    folder = tiny_models.make("qwen3", tmp_path / "model")
    spec = spec_for(folder, layers=(1,))
    found = {"model_path": str(folder), "load_format": "auto"}
    server = SimpleNamespace(**{**found, "dtype": torch.float32, "quantization": None, **changes})
    with (
        contextlib.nullcontext()
        if named is None
        else pytest.raises(SystemExit, match=f"cannot capture with sglang.*{re.escape(named)}")
    ):
        check_loaded_model(server, server, spec=spec)


def test_where_the_weights_changed_since_the_plan_the_server_does_not_start(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3", tmp_path / "model")
    planned = spec_for(folder, layers=(1,))
    weights = folder / "model.safetensors"
    save_file(
        {name: tensor * 1.01 for name, tensor in load_file(weights).items()},
        weights,
        metadata={"format": "pt"},
    )
    (tmp_path / "root").mkdir()
    with (
        pytest.raises(AssertionError, match="the model has changed since the plan"),
        serve(planned, folder=folder, root=tmp_path / "root"),
    ):
        pass


def test_a_server_that_replaces_the_models_configuration_does_not_start(tmp_path: Path) -> None:
    """The weights are those of the plan, but every position is rotated otherwise."""
    folder = tiny_models.make("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    rope = {**config.get("rope_parameters", {}), "rope_theta": 5.0}
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**config, "rope_parameters": rope, "rope_theta": 5.0}))
    (tmp_path / "root").mkdir()
    with (
        pytest.raises(AssertionError, match="it replaces the model of model.path"),
        serve(
            spec_for(folder, layers=(1,)),
            folder=folder,
            root=tmp_path / "root",
            flags=["--decrypted-config-file", str(other)],
        ),
    ):
        pass


def test_without_its_settings_the_plugin_is_inert() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "DRAFTSTATES_CAPTURE"
    }
    code = (
        "import sys; from draftstates.capture.plugin import register; register(); assert 'torch'"
        " not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
