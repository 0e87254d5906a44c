"""The command `doctor`: what it prints, and its exit status."""

import json
from pathlib import Path

import pytest
import yaml
from captured import tiny_model
from stub_sglang import Stub, serving

from draftstates.commands import cli


def status(*arguments: object) -> object:
    """Run the command and return its exit status."""
    try:
        cli.main(["doctor", *map(str, arguments)])
    except SystemExit as end:
        return end.code
    return 0


def test_a_server_that_would_lose_rows_is_status_3(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Stub(radix=True)) as url:
        assert status("--url", f"{url}/") == 3
        text = capsys.readouterr().out
        assert f"{url}: SGLang 0.5.23, stub\n" in text
        assert "the same again                64      63          1\n" in text
        assert "radix cache: WOULD CORRUPT A CAPTURE (measured)\n" in text
        assert "To change it: start the server with --disable-radix-cache" in text
        assert status("--url", url, "--json") == 3
    found = json.loads(capsys.readouterr().out)
    cache = next(each for each in found["findings"] if each["subject"] == "radix cache")
    assert (cache["verdict"], cache["certainty"]) == ("corrupts", "measured")


def test_a_harmless_server_is_status_0(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with serving(Stub(key="secret")) as url:
        assert status("--url", url, "--api-key-file", key) == 0
        assert "401" in str(status("--url", url))
    assert "expected http://HOST:PORT, found 'localhost'" in str(status("--url", "localhost"))


@pytest.mark.parametrize("budget", ["1GiB", "900TiB"])
def test_a_machine_is_held_to_a_configuration(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    budget: str,
) -> None:
    monkeypatch.setattr("draftstates.report.machine._WRITE_SECONDS", 0.05)
    model = tiny_model(tmp_path / "model")
    config = {
        "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8},
        "model": {"path": str(model)},
        "capture": {"residual_layers": [1]},
        "server": {"device": "cpu", "queue_bytes": budget},
        "results": str(tmp_path / "results"),
    }
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(config))
    fits = budget == "1GiB"
    assert status("--config", file) == (0 if fits else 3)
    text = capsys.readouterr().out
    assert ("It cannot run here as configured. memory: " in text) != fits
    assert status("--config", file, "--json") == (0 if fits else 3)
    found = json.loads(capsys.readouterr().out)
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert verdicts["memory"] == ("enough" if fits else "short")
    assert found["limit"].startswith("The disk will be the limit: ") == fits
    assert found["seconds"] is None
