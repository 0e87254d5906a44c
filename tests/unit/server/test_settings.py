"""Settings of a server, which its supervisor reads from a file."""

import json
from pathlib import Path

import pytest

from draftstates.server.settings import ServerSettings

NEEDED = {"state": Path("state"), "log": Path("server.log"), "command": ["server"]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"api_key_file": Path("/keys/mine")},
        {"image": Path("server.sif"), "image_args": ["--nv"], "scratch": Path("/tmp/s")},
        {"env": {"A": "1"}, "start_seconds": 2.0, "replicas": 3},
    ],
)
def test_settings_are_read_as_they_were_written(more: dict[str, object]) -> None:
    settings = ServerSettings(**NEEDED, **more)
    assert ServerSettings.from_json(settings.to_json()) == settings


def test_a_value_that_cannot_be_is_refused_in_a_file_too() -> None:
    text = ServerSettings(**NEEDED).to_json()
    with pytest.raises(ValueError, match="replicas"):
        ServerSettings.from_json(json.dumps({**json.loads(text), "replicas": 0}))
