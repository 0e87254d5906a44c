"""An external server: the clients are given the name of the one that passed the self-test."""

import time
from pathlib import Path

import pytest

from draftstates.server import external, replica
from draftstates.server.external import ExternalServer
from draftstates.server.folder import RunFolder
from draftstates.server.replica import Replica
from draftstates.server.settings import ServerSettings

# Does what the self-test does with the address: it adds the server's name.
SELF_TEST = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
path.write_text(json.dumps({**json.loads(path.read_text()), "server": "first"}))
"""


def test_clients_expect_the_external_server_that_was_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (external, replica):
        monkeypatch.setattr(module, "health", lambda *args, **kwargs: None)
    settings = ServerSettings(
        launcher="external",
        url="http://127.0.0.1:9/",
        state=tmp_path,
        log=tmp_path / "server.log",
        selftest=["{python}", "-c", SELF_TEST, "{address}"],
    )
    place = RunFolder(tmp_path).server("0")
    place.folder.mkdir(parents=True)
    tested = Replica(settings, ExternalServer(settings), api_key="k", number=0, place=place)
    assert tested.address.server is None
    deadline = time.monotonic() + 60
    while not tested.ready:
        assert tested.failure() is None
        assert not place.address.exists() or tested.ready
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tested.address.url, tested.address.server) == ("http://127.0.0.1:9", "first")
    assert place.address.exists() and not place.candidate.exists()
