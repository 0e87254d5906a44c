"""The processes of a lease: their information, their ends, and what they share."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lease_harness import Playground, announced, ask, ended, eventually, find

from draftstates.errors import UserError
from draftstates.server.lease import lease
from draftstates.server.processes import Process
from draftstates.server.run import RUN_FOLDER_VARIABLE, is_over, present_run, start_run
from draftstates.server.settings import ServerSettings


def client_with_owner(
    play: Playground, settings: ServerSettings
) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Start a process that holds a lease for ten minutes, and the process that owns the server."""
    owner = subprocess.Popen(["sleep", "600"])
    client = play.client(settings, owner=owner)
    announced(play)
    return client, owner


def test_the_server_ends_when_idle_and_not_while_leased(play: Playground) -> None:
    settings = play.settings("--helpers", "2", idle_seconds=0.5)
    with lease(settings) as address:
        time.sleep(1.5)
        ask(address.url, address.api_key)
        assert len(find(play, "time.sleep(600)")) == 2
        assert len(list(settings.state.glob("run-*/key.yaml"))) == 1
    ended(play, within=5)
    assert not list(settings.state.glob("run-*/key.yaml"))
    assert not list(settings.state.glob("run-*/leases/*"))


def test_a_second_lease_within_the_idle_time_finds_the_same_server(play: Playground) -> None:
    with lease(play.settings()) as first:
        pass
    with lease(play.settings()) as second:
        assert first == second
    assert len(play.starts()) == 1


def test_no_descriptor_of_client_or_supervisor_reaches_the_server(play: Playground) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    pipe = os.readlink(f"/proc/self/fd/{write}")
    try:
        with lease(play.settings()) as address:
            found = ask(address.url, address.api_key)
            assert "server.log" in found
            assert pipe not in found
            assert "lock" not in found
            supervisor = find(play, "draftstates.server.supervisor")[0]
            links = [
                os.readlink(path)
                for path in Path(f"/proc/{supervisor}/fd").iterdir()
                if path.is_symlink()
            ]
            assert pipe not in links
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    "victim", ["draftstates.server.supervisor", "draftstates.server.keeper", "stub_server.py"]
)
def test_one_process_killed_takes_the_whole_tree_along(play: Playground, victim: str) -> None:
    with lease(play.settings("--stubborn", "--helpers", "2", idle_seconds=600.0)):
        # The keeper's command line holds the server's.
        pids = play.starts() if victim == "stub_server.py" else find(play, victim)
        os.kill(pids[0], signal.SIGKILL)
        ended(play)


def test_supervisor_and_keeper_killed_at_once_take_the_server_along(play: Playground) -> None:
    with lease(play.settings("--stubborn", "--helpers", "2", idle_seconds=600.0)):
        for word in ("draftstates.server.supervisor", "draftstates.server.keeper"):
            # Neither process may see the other's end.
            os.kill(find(play, word)[0], signal.SIGSTOP)
        for word in ("draftstates.server.supervisor", "draftstates.server.keeper"):
            os.kill(find(play, word)[0], signal.SIGKILL)
        ended(play, within=5)


def test_after_a_killed_supervisor_the_next_server_waits_for_the_old_one_to_end(
    play: Playground,
) -> None:
    settings = play.settings("--stubborn")
    with lease(settings):
        supervisor = find(play, "draftstates.server.supervisor")[0]
        os.kill(supervisor, signal.SIGKILL)
        eventually(
            lambda: supervisor not in find(play, "draftstates.server.supervisor"),
            within=5,
            what="the supervisor is gone",
        )
    with lease(settings):
        # One server and its keeper.
        assert len(find(play, "stub_server.py", "--stubborn")) == 2
    assert len(play.starts()) == 2


def test_a_server_that_dies_under_a_lease_is_in_the_error_and_the_next_lease_starts_another(
    play: Playground,
) -> None:
    # The rest of the first server ends while the second one waits.
    settings = play.settings("--stubborn", "--helpers", "1", stop_seconds=2.0)
    with (
        pytest.raises(
            UserError,
            match=(
                r"(?s)refused.*the server was ended by SIGKILL; the last lines of"
                r" .*server.log:\nready"
            ),
        ),
        lease(settings),
    ):
        os.kill(play.starts()[0], signal.SIGKILL)
        raise ConnectionError("connection refused")
    with lease(settings) as address:
        ask(address.url, address.api_key)


def test_an_error_that_is_not_the_servers_passes_unchanged(play: Playground) -> None:
    with pytest.raises(ZeroDivisionError), lease(play.settings()):
        raise ZeroDivisionError


def test_a_server_stopped_by_hand_is_named(play: Playground) -> None:
    with (
        pytest.raises(UserError, match="the server was stopped while it was in use"),
        lease(play.settings()),
    ):
        os.kill(find(play, "draftstates.server.supervisor")[0], signal.SIGTERM)
        raise ConnectionError("connection refused")
    ended(play)


def test_the_owners_end_ends_server_and_clients(play: Playground) -> None:
    client, owner = client_with_owner(play, play.settings(idle_seconds=600.0))
    # The test does not wait for the process: it stays as a zombie, which counts as dead.
    owner.kill()
    assert client.wait(timeout=10) == 128 + signal.SIGTERM, "told to end, and cleared up"
    ended(play)
    owner.wait()


def test_a_process_that_got_an_owners_number_later_is_not_the_owner(play: Playground) -> None:
    current = Process.current()
    assert current.is_alive()
    assert not dataclasses.replace(current, started=current.started - 1).is_alive()


def test_a_lease_for_a_run_that_is_over_is_refused_and_a_new_snakemake_begins_another(
    play: Playground,
) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    run = start_run(play.folder / "state", owner=Process.of(owner.pid))
    assert present_run()
    # The test does not wait for the process: it stays as a zombie, which counts as dead.
    owner.kill()
    eventually(lambda: is_over(run), within=5, what="the owner is gone")
    with (
        pytest.raises(UserError, match="the run that DRAFTSTATES_RUN_FOLDER names is over"),
        lease(play.settings()),
    ):
        pass
    owner.wait()
    assert start_run(play.folder / "state").folder.exists()
    assert not run.folder.exists(), "nobody else removes what a dead run has left"


def test_a_server_with_other_settings_is_not_shared(play: Playground) -> None:
    with (
        lease(play.settings()),
        pytest.raises(UserError, match="a server with other settings runs there"),
        lease(play.settings("--delay", "0.1")),
    ):
        pass


def test_a_server_of_another_run_in_the_same_folder_is_named_and_not_shared(
    play: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lease(play.settings()):
        monkeypatch.delenv(RUN_FOLDER_VARIABLE)
        with (
            pytest.raises(UserError, match="a server of another run works there, that of process"),
            lease(play.settings()),
        ):
            pass
    assert len(play.starts()) == 1


def test_a_server_of_the_other_kind_ends_before_this_one_starts(play: Playground) -> None:
    with lease(play.settings("--stubborn", "--helpers", "1", stop_seconds=1.0)) as captures:
        pass
    answers = play.settings("--delay", "0.1", kind="generate", replicas=2)
    with lease(answers) as one, lease(answers) as other:
        assert len({one.url, other.url, captures.url}) == 3
        assert not find(play, "stub_server.py", "--stubborn")
        assert len(play.starts()) == 3


def test_a_server_with_other_settings_that_a_dead_run_has_left_is_replaced(
    play: Playground,
) -> None:
    client, owner = client_with_owner(play, play.settings("--stubborn", idle_seconds=600.0))
    supervisor = find(play, "draftstates.server.supervisor")[0]
    # The supervisor must not see its owner's end itself.
    os.kill(supervisor, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    client.wait(timeout=10)
    threading.Timer(1.0, os.kill, (supervisor, signal.SIGCONT)).start()
    with lease(play.settings("--delay", "0.1")):
        assert not find(play, "stub_server.py", "--stubborn")


def test_a_server_that_is_never_ready_fails_at_its_deadline(play: Playground) -> None:
    began = time.monotonic()
    with (
        pytest.raises(UserError, match=r"not ready within 2 s \(.*refused"),
        lease(play.settings("--delay", "600", start_seconds=2.0)),
    ):
        pass
    assert time.monotonic() - began < 10
    ended(play)


def test_a_command_that_does_not_exist_is_named(play: Playground) -> None:
    settings = play.settings().model_copy(update={"command": ["/no/such/program"]})
    with (
        pytest.raises(UserError, match="cannot start /no/such/program: No such file"),
        lease(settings),
    ):
        pass


def test_a_held_server_stays_until_interrupted_and_its_death_is_told(play: Playground) -> None:
    (play.folder / "settings.json").write_text(play.settings(idle_seconds=0.5).to_json())
    code = (
        "from draftstates.server.lease import hold; from draftstates.server.settings import"
        " ServerSettings; from draftstates.errors import run_command;"
    )
    code += "run_command(lambda: hold(ServerSettings.from_json(open('settings.json').read())))"
    # The text before the words is "refused" or "reset", by the moment of the kill.
    for number, status, words in [
        (signal.SIGINT, 0, ""),
        (signal.SIGKILL, 1, "\nthe server was ended by SIGKILL; the last lines of"),
    ]:
        holder = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=play.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline().startswith("ready at http://127.0.0.1:")
        time.sleep(1.0)
        assert holder.poll() is None
        os.kill(holder.pid if number == signal.SIGINT else play.starts()[-1], number)
        assert words in holder.communicate(timeout=20)[1]
        assert holder.returncode == status
        ended(play)
