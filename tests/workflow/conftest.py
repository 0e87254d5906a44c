"""A place where leased servers are tried out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lease_harness import MARK, Playground

from draftstates.server.processes import OWNER_VARIABLE


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    """A folder; whatever was started for it is ended afterwards."""
    playground = Playground(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", playground.environment()["PYTHONPATH"])
    monkeypatch.delenv(OWNER_VARIABLE, raising=False)
    yield playground
    playground.end()
