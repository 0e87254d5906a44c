"""An external server: the clients are given the name of the one that passed the self-test."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftstates.server import acceptance
from draftstates.server.processes import Process
from draftstates.server.state import State

# Does what the self-test does with the address: it adds the server's name, and counts its calls.
SELF_TEST = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
name = path.with_name("running").read_text()
path.write_text(json.dumps({**json.loads(path.read_text()), "server": name}))
path.with_name("calls").open("a").write("x")
"""


def test_clients_expect_the_external_server_that_was_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "health", lambda *args, **kwargs: None)
    settings = SimpleNamespace(
        url="http://127.0.0.1:9/",
        api_key_file=None,
        fingerprint="f",
        selftest=["{python}", "-c", SELF_TEST, "{address}"],
        env={},
        start_seconds=60.0,
    )
    state, owner = State(tmp_path), Process.current()

    def servers() -> str | None:
        return acceptance.external_address(settings, state, owner=owner).server

    running = tmp_path / "running"
    running.write_text("first")
    assert (servers(), servers()) == ("first", "first")
    # A restart within a run changes nothing: the client refuses the new server's answers.
    running.write_text("second")
    assert servers() == "first"
    assert (tmp_path / "calls").read_text() == "x"
    # the next run tests it
    owner = Process(pid=1, started=0)
    assert servers() == "second"
    assert json.loads(state.accepted.read_text())["server"] == "second"
