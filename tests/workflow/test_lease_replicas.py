"""Several servers on one machine.

Each job has one server, each server has its own GPUs, and the death of one costs the others
nothing.
"""

import contextlib
import os
import signal

import pytest
from lease_harness import Playground, addresses, asked, ended, eventually

from draftstates.errors import UserError
from draftstates.server.lease import lease


def test_leases_are_spread_over_the_replicas_by_load(play: Playground) -> None:
    settings = play.settings(replicas=3)
    with contextlib.ExitStack() as stack:
        leased = [stack.enter_context(lease(settings)).url for _ in range(6)]
        assert sorted(leased.count(url) for url in set(leased)) == [2, 2, 2]
    with lease(settings), lease(settings) as second:
        assert second.url in leased
    assert len(play.starts()) == 3
    assert (play.folder / "server.2.log").read_text().endswith("ready\n")


def test_a_replica_that_dies_is_started_again_alone_and_its_work_goes_to_the_others(
    play: Playground,
) -> None:
    settings = play.settings(
        "--stubborn", "--helpers", "1", "--delay", "1", replicas=2, stop_seconds=0.5
    )
    with lease(settings) as kept:
        keeper_of_work = asked(kept)["pid"]
        with (
            pytest.raises(UserError, match=r"(?s)refused.*the server was ended by SIGKILL"),
            lease(settings) as lost,
        ):
            assert lost.url != kept.url
            os.kill(asked(lost)["pid"], signal.SIGKILL)
            raise ConnectionError("refused")
        with lease(settings) as retried:
            # The other server has not restarted yet.
            assert retried.url == kept.url
        eventually(
            lambda: len(play.starts()) == 3, within=15, what="the dead replica is started again"
        )
        assert asked(kept)["pid"] == keeper_of_work

        def back() -> bool:
            with lease(settings) as another:
                return another.url not in (kept.url, lost.url)

        eventually(back, within=15, what="the new replica takes work")
    ended(play)


def test_a_replica_that_keeps_dying_is_given_up_and_the_others_go_on(play: Playground) -> None:
    settings = play.settings(replicas=2, restarts=1, stop_seconds=0.5)
    with lease(settings) as kept:
        survivor = asked(kept)["pid"]
        for starts in (2, 3):
            eventually(
                lambda starts=starts: len(play.starts()) == starts,
                within=15,
                what=f"start {starts}",
            )
            for pid in set(play.starts()) - {survivor}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: len(addresses(play.folder)) == 1,
            within=5,
            what="one left",
        )
        with lease(settings) as other:
            assert other.url == kept.url
    assert len(play.starts()) == 3


def test_all_replicas_dead_is_a_failure_and_the_next_lease_starts_all(play: Playground) -> None:
    settings = play.settings(replicas=2, restarts=0)
    with pytest.raises(UserError, match="ended by SIGKILL"), lease(settings):
        for pid in play.starts():
            os.kill(pid, signal.SIGKILL)
        raise ConnectionError("refused")
    with lease(settings) as first, lease(settings) as second:
        assert first.url != second.url
    assert len(play.starts()) == 4


def test_replicas_that_cannot_start_fail_at_once(play: Playground) -> None:
    with (
        pytest.raises(UserError, match="exited with status 3"),
        lease(play.settings("--break", replicas=2)),
    ):
        pass
    assert len(play.starts()) <= 2
    ended(play)


def test_each_replica_has_gpus_of_its_own(
    play: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    settings = play.settings(replicas=2, gpus_each=2)
    with lease(settings) as first, lease(settings) as second:
        assert {asked(address)["gpus"] for address in (first, second)} == {
            "4,5",
            "6,7",
        }
    ended(play)
    with (
        pytest.raises(UserError, match=r"3 replicas of 2 GPUs need 6, found 4 \(4,5,6,7\)"),
        lease(play.settings(replicas=3, gpus_each=2)),
    ):
        pass
