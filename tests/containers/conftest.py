"""A real Apptainer, and images made once for all tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_harness import INSTALLED, build, make_code


@pytest.fixture(scope="session", autouse=True)
def apptainer() -> Iterator[None]:
    """Put Apptainer on the path; without it the tests here are skipped by name."""
    if not (INSTALLED / "done").exists() or os.geteuid() != 0:
        pytest.skip("needs root and Apptainer as tests/containers/install.sh installs it on Debian")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{INSTALLED / 'usr/bin'}:{os.environ['PATH']}")
        assert shutil.which("apptainer")
        yield


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the workflow's folder that the images are made from."""
    folder = tmp_path_factory.mktemp("containers") / "code"
    make_code(folder)
    return folder


@pytest.fixture(scope="session")
def images(apptainer: None, code: Path) -> dict[str, Path]:
    """Build `tools` and `sglang`, by the project's own definitions."""
    return build(code)
