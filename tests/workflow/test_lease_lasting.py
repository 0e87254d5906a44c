"""Servers that end in the same way at every start: a run starts one of them, and every job gets its
error. What may pass is tried again.
"""

import json
import os
import signal
import sys
import time

import pytest
from lease_harness import Playground, ask, ended, eventually

from draftstates.errors import UserError
from draftstates.server.lease import lease
from draftstates.server.run import RUN_FOLDER_VARIABLE
from draftstates.server.settings import ServerSettings

REFUSED = "Traceback (most recent call last):\nValueError: Unsupported architectures: ['Nope']"
NO_MEMORY = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory."
NOTE = "no second attempt is made in this run"


def failure(settings: ServerSettings) -> str:
    with pytest.raises(UserError) as refused, lease(settings):
        pass
    return str(refused.value)


@pytest.mark.parametrize("end_with", ["1", str(-signal.SIGKILL)])
def test_an_engine_that_refuses_the_model_is_started_once_in_a_run(
    play: Playground, monkeypatch: pytest.MonkeyPatch, end_with: str
) -> None:
    settings = play.settings("--last-words", REFUSED, f"--end-with={end_with}", restarts=3)
    first = failure(settings)
    assert "Unsupported architectures" in first
    assert NOTE in first
    ended(play)
    assert [failure(settings) for _ in range(2)] == [first, first]
    assert len(play.starts()) == 1
    # whoever runs again may have mended the model
    monkeypatch.delenv(RUN_FOLDER_VARIABLE)
    assert "Unsupported architectures" in failure(settings)
    assert len(play.starts()) == 2
    ended(play)
    with lease(play.settings()):
        assert len(play.starts()) == 3


@pytest.mark.parametrize(
    ("words", "end_with"), [(NO_MEMORY, "1"), ("loading", str(-signal.SIGKILL))]
)
def test_an_engine_that_was_killed_or_had_no_memory_is_started_again(
    play: Playground, words: str, end_with: str
) -> None:
    settings = play.settings("--last-words", words, f"--end-with={end_with}")
    for count in (1, 2):
        assert NOTE not in failure(settings)
        assert len(play.starts()) == count


def test_every_waiting_job_of_a_run_gets_the_error_of_the_one_start(play: Playground) -> None:
    settings = play.settings("--last-words", REFUSED)
    run = play.snakemake(settings, "--cores", "3", "--keep-going", "--retries", "1", shards=6)
    assert run.wait(timeout=120) == 1
    logs = [(play.folder / f"logs/{number}.log").read_text() for number in range(6)]
    assert len(set(logs)) == 1
    assert "Unsupported architectures" in logs[0]
    assert len(play.starts()) == 1


@pytest.mark.parametrize("launcher", ["local", "external"])
def test_a_refusal_of_the_selftest_lasts_and_another_failure_of_it_does_not(
    play: Playground, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    tested = play.folder / "tested"
    code = f"import sys; open('{tested}', 'a').write('x'); print('the rows differ'); sys.exit({{}})"
    with lease(play.settings()) as address:
        (play.folder / "key").write_text(str(address.api_key))
        settings = play.settings(
            launcher=launcher,
            url=address.url if launcher == "external" else None,
            api_key_file=play.folder / "key",
            log=play.folder / "other.log",
        )
        for status, tests in ((2, 1), (1, 3)):
            # each in a run of its own
            monkeypatch.delenv(RUN_FOLDER_VARIABLE)
            tried = settings.model_copy(
                update={
                    "selftest": [sys.executable, "-c", code.format(status)],
                    "state": play.folder / f"state-{status}",
                }
            )
            found = [failure(tried) for _ in range(2)]
            assert all("the rows differ" in error for error in found), found
            assert [NOTE in error for error in found] == [status == 2] * 2
            assert len(tested.read_text()) == tests


def test_a_replica_that_cannot_start_again_is_given_up_while_the_others_serve(
    play: Playground,
) -> None:
    model = play.folder / "model"
    model.touch()
    stub = play.settings(replicas=2, restarts=3, stop_seconds=0.5)
    # the server refuses as soon as the model is gone
    wrapper = (
        f"import os, sys; os.path.exists('{model}') or sys.exit('draftstates: cannot capture with'"
        " + ' sglang 0: the model is gone'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    settings = stub.model_copy(update={"command": [sys.executable, "-c", wrapper, *stub.command]})
    refusal = "draftstates: cannot capture with sglang"

    def refusals() -> int:
        return sum(path.read_text().count(refusal) for path in play.folder.glob("server.*.log"))

    with lease(settings) as kept:
        served = json.loads(ask(kept.url, kept.api_key))["pid"]
        model.unlink()
        os.kill(next(pid for pid in play.starts() if pid != served), signal.SIGKILL)
        eventually(refusals, within=15, what="the replica is started again, and refuses")
        # a second start would come in this time
        time.sleep(2.0)
        assert refusals() == 1
        with lease(settings) as other:
            assert other == kept
