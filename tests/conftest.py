"""Puts tests/ on the path: what several test folders share lies beside this file."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's model, SmolLM2-135M-Instruct, made first if it is not there."""
    folder = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, REPOSITORY / "scripts" / "prepare_demo_model.py", "--output", folder], check=True)
    return folder
