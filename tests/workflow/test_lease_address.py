"""The address that a lease gives: private, tested, and known to work; else an error says why."""

import dataclasses
import stat
import sys
import urllib.error
from pathlib import Path

import pytest
from lease_harness import Playground, addresses, ask, ended
from pydantic import ValidationError

from draftstates.errors import UserError
from draftstates.server.lease import lease
from draftstates.server.run import RUN_FOLDER_VARIABLE
from draftstates.server.settings import ServerSettings

SELFTEST = [sys.executable, "-c"]
READ_ADDRESS = (
    "from draftstates.server.address import read_address; from pathlib import Path; a ="
    " read_address(Path(sys.argv[1]));"
)


def test_the_address_file_and_the_logs_are_private_and_the_key_is_on_no_command_line(
    play: Playground,
) -> None:
    with lease(play.settings()) as address:
        assert address.api_key
        (run,) = play.folder.glob("state/run-*")
        private = [play.folder / "server.log", *(path for path in run.rglob("*") if path.is_file())]
        assert {"key.yaml", "address.json"} <= {path.name for path in private}
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        for path in private:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600 or path.name == "stop", path
        assert not [line for line in play.survivors() if address.api_key in line]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(address.url, "another key")


def test_the_key_is_not_in_an_error(play: Playground) -> None:
    with pytest.raises(UserError, match="api-key: <api key>"), lease(play.settings("--break")):
        pass
    assert "api-key: <" not in (play.folder / "server.log").read_text()


def test_a_server_that_fails_its_selftest_is_given_to_nobody(play: Playground) -> None:
    settings = play.settings(selftest=[*SELFTEST, "import sys; sys.exit('the rows differ')"])
    with (
        pytest.raises(UserError, match=r"(?s)failed its self-test \(status 1\):\nthe rows differ"),
        lease(settings),
    ):
        pass
    assert not addresses(play.folder)
    ended(play)


def test_the_selftest_gets_the_address_before_anyone_else(play: Playground) -> None:
    announced = f"{play.folder}/state/run-*/servers/*/address.json"
    unannounced = f"import glob; assert not glob.glob('{announced}');"
    code = (
        f"import sys; {unannounced} {READ_ADDRESS} open('{play.folder}/tested', 'a').write(a.url)"
    )
    with lease(play.settings(selftest=[*SELFTEST, code, "{address}"])) as address:
        assert (play.folder / "tested").read_text() == address.url


def test_an_external_server_is_tested_once_a_run(
    play: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lease(play.settings()) as address:
        (play.folder / "key").write_text(f"{address.api_key}\n")
        code = f"import sys; {READ_ADDRESS} open('{play.folder}/tested', 'a').write(a.api_key)"
        settings = play.settings(
            launcher="external",
            url=f"{address.url}/",
            api_key_file=play.folder / "key",
            state=play.folder / "external",
            selftest=[*SELFTEST, code, "{address}"],
        )
        # a run of its own, beside the one that started the server
        monkeypatch.delenv(RUN_FOLDER_VARIABLE)
        for _ in range(2):
            with lease(settings) as external:
                same = dataclasses.replace(address, launcher="external", failed=external.failed)
                assert external == same
        assert (play.folder / "tested").read_text() == address.api_key
        monkeypatch.delenv(RUN_FOLDER_VARIABLE)
        with lease(settings):
            assert (play.folder / "tested").read_text() == 2 * str(address.api_key)
        refused = settings.model_copy(
            update={"selftest": [*SELFTEST, "import sys; sys.exit('no plug-in')"]}
        )
        monkeypatch.delenv(RUN_FOLDER_VARIABLE)
        with pytest.raises(UserError, match="no plug-in"), lease(refused):
            pass


def test_an_external_server_that_is_not_there_is_named(play: Playground) -> None:
    settings = play.settings(launcher="external", url="http://127.0.0.1:9")
    with (
        pytest.raises(
            UserError, match=r"server.url: no server is ready at http://127.0.0.1:9: .*refused"
        ),
        lease(settings),
    ):
        pass
    with (
        pytest.raises(UserError, match="server.api_key_file: .*nowhere: No such file"),
        lease(settings.model_copy(update={"api_key_file": Path("nowhere")})),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launcher": "slrm"}, "launcher.*\n.* 'local', 'slurm' or 'external'"),
        ({"launcher": "external"}, "needs the address of a server"),
        ({"command": []}, "needs the command of a server"),
        ({"replicas": 0}, "replicas.*\n.*greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    play: Playground, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerSettings(**{**dict(play.settings()), **changes})
