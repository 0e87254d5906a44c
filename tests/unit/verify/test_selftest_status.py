"""What the self-test's exit status says: whether a second start would be refused too."""

from pathlib import Path

import pytest
from captured import capture, plan_of, tiny_model

from draftstates.errors import LASTING_STATUS, UserError, run_command
from draftstates.extract.client import WaitedInVain
from draftstates.server.address import Address
from draftstates.verify import selftest


@pytest.mark.parametrize(
    ("error", "problem", "lasting"),
    [
        (UserError("the rows differ"), None, True),
        (UserError("no answer"), "connection refused", False),
        (WaitedInVain("no receipt after 120 s"), None, False),
    ],
)
def test_only_a_server_that_still_answers_is_refused_for_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: UserError,
    problem: str | None,
    lasting: bool,
) -> None:
    def attest(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(selftest, "attest", attest)
    monkeypatch.setattr(selftest, "health", lambda url, *, seconds: problem)
    address, plan = tmp_path / "address.json", tmp_path / "plan.json"
    Address(url="http://127.0.0.1:9", api_key=None, launcher="local").write(address)
    plan_of(capture(tiny_model(tmp_path / "model"))).publish(plan)
    paths = {"address": address, "plan": plan, "model": tmp_path, "root": tmp_path}
    paths["output"] = tmp_path / "attestation.json"
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    monkeypatch.setattr("sys.argv", ["selftest", *words, "--parity-tokens", "64"])
    with pytest.raises(SystemExit) as ended:
        run_command(selftest.main)
    said = f"error: {error}"
    assert (ended.value.code, capsys.readouterr().err.strip()) == (
        (LASTING_STATUS, said) if lasting else (said, "")
    )
    assert not paths["output"].exists()
