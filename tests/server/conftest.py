"""One real server for the session, and models for the other servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_harness import Running, serve, spec_for


@pytest.fixture(scope="session")
def smollm2(demo_model: Path) -> Path:
    return demo_model


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve SmolLM2 in float32, with chunks of 256 tokens.

    The server captures r_0, r_2, r_15, r_27, r_30 and the post-norm state.
    """
    root = tmp_path_factory.mktemp("server") / "root"
    root.mkdir()
    spec = spec_for(smollm2, layers=(0, 2, 15, 27, 30))
    with serve(spec, folder=smollm2, root=root, flags=["--chunked-prefill-size", "256"]) as running:
        yield running


@pytest.fixture(scope="session")
def shared_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve the same model with the radix cache on and chunks of 2048 tokens.

    Other users could share such a server.
    """
    root = tmp_path_factory.mktemp("shared") / "root"
    root.mkdir()
    spec = spec_for(smollm2, layers=(0, 2, 15, 27, 30))
    with serve(
        spec, folder=smollm2, root=root, radix_cache=True, flags=["--chunked-prefill-size", "2048"]
    ) as running:
        found = [path.name for path in root.iterdir()]
        assert found == [".audits"], "the warm-up request wrote something"
        yield running
