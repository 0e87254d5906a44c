"""Room for shards that stay in a compact form: their own bytes, and those of the shards in work."""

import shutil
from pathlib import Path

import pytest
from captured import capture, plan_of, tiny_model, verify, write

from draftstates.errors import UserError
from draftstates.paths import Capture
from draftstates.plan.room import check_missing, check_room, kept_bytes, work_bytes
from draftstates.plan.words import of_bytes
from draftstates.shards.compact import Storage
from draftstates.shards.compacting import store_compact

TOP, PLAIN = "e4m3-top-token", "e4m3"
NAMES = [digit * 32 for digit in "abc"]


@pytest.mark.parametrize("form", [TOP, PLAIN])
@pytest.mark.parametrize("section", [{}, {"final_state": False}, {"residual_layers": []}])
def test_a_compact_file_takes_at_most_what_was_planned(
    tmp_path: Path, form: str, section: dict
) -> None:
    model = tiny_model(tmp_path / "model")
    captured = capture(model, samples=40, **section)
    files, spec = write(captured, tmp_path / "shards"), captured.spec
    storage = Storage(
        fp8="all", supervised_rows=False, keep_top_token=form == TOP and spec.final_state
    )
    stored = store_compact(
        files.shard,
        tmp_path / "compact.safetensors",
        storage=storage,
        verified=verify(files),
        capture=spec,
        model=model,
    )
    (planned,) = plan_of(captured).shards
    header = 4096 + 100 * len(captured.names)
    found = kept_bytes(planned, spec=spec, form=form)
    assert stored.bytes - header < found < 0.75 * planned.bytes
    assert kept_bytes(planned, spec=spec, form=None) == planned.bytes


def test_the_shards_in_work_need_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = [10, 70, 20, 30, 40, 50]
    work = work_bytes(captured, form=TOP)
    assert work == 70 + 50 + 40 + 30
    assert work_bytes(captured, form=None) == 0
    usage = shutil.disk_usage(tmp_path)
    asked = {"capture_folder": tmp_path / "m-1", "form": TOP, "work": work}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=work + 6))
    room = check_room(NAMES, [1, 2, 3], budget=work + 6, **asked)
    assert (room.needed, room.present) == (work + 6, 0)
    with pytest.raises(
        UserError, match="max_bytes: the shards take 196 B .3 shards., allowed are 195 B: allow 1 B"
    ):
        check_room(NAMES, [1, 2, 3], budget=work + 5, **asked)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=work + 5))
    with pytest.raises(UserError, match="take 196 B, the disk has 195 B free: make room for 1 B"):
        check_room(NAMES, [1, 2, 3], budget=None, **asked)


def store(capture: Capture, name: str) -> None:
    """Leave empty files where a shard is stored."""
    paths = (capture.compact(name, TOP), capture.stored(name, TOP))
    for path in (*paths, capture.verified(name), capture.receipts(name)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_stored_shards_need_no_room_and_no_work(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "m-1")
    asked = {"capture_folder": capture.folder, "budget": None, "form": TOP, "work": 100}
    store(capture, NAMES[0])
    room = check_room(NAMES, [1, 2, 3], **asked)
    assert (room.needed, room.present) == (105, 1)
    for name in NAMES[1:]:
        store(capture, name)
    room = check_room(NAMES, [1, 2, 3], **asked)
    assert (room.needed, room.present) == (0, 6)
    capture.verified(NAMES[1]).unlink()
    assert check_room(NAMES, [1, 2, 3], **asked).present == 4, "nothing vouches for it"


def test_before_a_server_starts_a_captured_file_that_waits_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = capture(tiny_model(tmp_path / "model"))
    plan, usage = plan_of(captured), shutil.disk_usage(tmp_path)
    (shard,) = plan.shards
    needed = kept_bytes(shard, spec=plan.capture, form=TOP) + shard.bytes
    folder = tmp_path / plan.capture_folder

    def check(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        check_missing(plan, capture_folder=folder, form=TOP)

    check(needed)
    with pytest.raises(UserError, match=f"take {of_bytes(needed)}, .* room for 1 B more"):
        check(needed - 1)
    size = write(captured, folder / "shards").shard.stat().st_size
    check(needed - size)
    store(Capture(folder), shard.shard_id)
    check(0)
