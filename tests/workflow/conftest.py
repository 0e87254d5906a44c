"""A tiny model, and a real server on it.

Every workspace of the session uses the server through `server.launcher: external`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from workspace import make_tiny_model, tiny_config

sys.path.append(str(Path(__file__).parents[1] / "server"))

sys.path.append(str(Path(__file__).parents[1] / "campaign"))

import preloaded  # noqa: E402
from server_harness import Running, serve, spec_for  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder, demo_model)
    return folder


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Running]:
    """Start a server for `tiny_config` as other users may have it running, with its radix cache on.

    Its root is the results folder of its users.
    """
    root = tmp_path_factory.mktemp("real") / "results"
    root.mkdir()
    spec = spec_for(tiny_model, layers=tiny_config()["capture"]["residual_layers"])
    with serve(spec, folder=tiny_model, root=root, radix_cache=True) as running:
        yield running


@pytest.fixture(scope="session")
def preloaded_libraries() -> Iterator[None]:
    """Start the process in whose forks a `QuickWorkspace` runs Snakemake and its scripts."""
    with preloaded.preloaded():
        yield
