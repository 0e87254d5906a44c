"""Answers by the target model in the status of a run, and those that can be removed."""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from answer_kit import answer_all, asking, prompts_of, says, stub_server, user

from draftstates.commands import status
from draftstates.errors import UserError
from draftstates.extract.progress import SILENT_SECONDS, ProgressFile
from draftstates.report.answering import answering
from draftstates.report.prune import old_answers, remove
from draftstates.tokens.answered import AnsweredRows
from draftstates.tokens.files import publish_accounting

ROWS = [user(f"What is {n}+{n}?") for n in range(4)]
OPTIONS = asking(chunk=1)


def answered(results: Path, rows: list[Any] = ROWS) -> Path:
    """Answer rows as the source `chats` of a results folder; return the source's folder."""
    folder = results / "answers" / "chats"
    prompts_of(folder, rows, OPTIONS)
    with stub_server(lambda ids: says("Four.<|im_end|>")) as server:
        answer_all(folder, OPTIONS, server.url)
    return folder


def tokenised(results: Path) -> None:
    """Write the accounting of the source, a minute later."""
    rows = AnsweredRows(results / "answers" / "chats" / "key", OPTIONS)
    list(rows.results())
    tokens = results / "tokens" / "chats.parquet"
    tokens.parent.mkdir(exist_ok=True)
    tokens.touch()
    accounting = tokens.with_suffix(".json")
    publish_accounting({"answers": rows.account()}, accounting, tokens=tokens)
    os.utime(accounting, times=(time.time() + 60,) * 2)


def shown(results: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    status.main(parser.parse_args(["--results", str(results), "--json"]))
    return json.loads(capsys.readouterr().out)


def test_status_as_json_has_the_answers_before_there_is_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = answered(tmp_path)
    (first, *_) = sorted((folder / "key").glob("*.parquet"))
    chunk = len(AnsweredRows(folder / "key", OPTIONS)._read(first))
    first.unlink()
    with pytest.raises(UserError, match="expected a plan"):
        shown(tmp_path, capsys)
    progress = ProgressFile(
        folder / "key" / ".building" / first.stem, shard_id=first.stem, total=2 * chunk, server="u"
    )
    progress.running = dataclasses.replace(progress.running, done=chunk, started=time.time() - 10)
    progress._write()
    found = shown(tmp_path, capsys)
    assert found["done"] is False
    (source,) = found["answers"]
    # half of the conversations of this chunk, and all others
    assert source["done_prompts"] == len(ROWS) - chunk / 2
    assert source["prompts_per_second"] == pytest.approx(chunk / 2 / 10, rel=0.2)
    assert source["seconds_left"] == pytest.approx(10, rel=0.2)
    assert (source["source"], source["prompts"], source["servers"]) == ("chats", len(ROWS), ["u"])


def test_a_job_that_was_killed_under_another_key_is_not_under_way_for_ever(tmp_path: Path) -> None:
    folder = answered(tmp_path)
    name = next((folder / "key").glob("*.parquet")).stem
    place = folder / "other" / ".building" / name
    place.mkdir(parents=True)
    ProgressFile(place, shard_id=name, total=1, server="u")
    assert [each.source for each in answering(tmp_path)] == ["chats"]
    file = place / "progress.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "updated": time.time() - SILENT_SECONDS - 1}))
    assert answering(tmp_path) == []


def test_answers_to_other_prompts_and_of_other_keys_are_old_once_tokens_hold_the_present_ones(
    tmp_path: Path,
) -> None:
    folder = answered(tmp_path)
    before = {*(folder / "key").glob("*.parquet")}
    other = folder / "other"
    other.mkdir()
    (other / "chunk.parquet").write_bytes(b"12345")
    # the first prompt is another one
    answered(tmp_path, [user("And now?"), *ROWS[1:]])
    assert old_answers(tmp_path) == [], "nothing is tokenised"
    tokenised(tmp_path)
    found = {each.path: each.bytes for each in old_answers(tmp_path)}
    stale = before - {folder / "key" / f"{name}.parquet" for name in planned(folder)}
    assert found == {
        other: 5,
        **{path: path.stat().st_size for path in stale},
        **{path: size_of(path) for path in left_over(folder)},
    }
    assert stale
    # answers of a run that is on its way to use them
    fresh = folder / "newer" / "chunk.parquet"
    fresh.parent.mkdir()
    fresh.touch()
    os.utime(fresh, times=(time.time() + 120,) * 2)
    assert fresh.parent not in {each.path for each in old_answers(tmp_path)}
    remove([], [], old_answers(tmp_path))
    assert fresh.exists()
    assert not other.exists()
    assert old_answers(tmp_path) == []
    assert len(list(AnsweredRows(folder / "key", OPTIONS).results())) == len(ROWS)


def planned(folder: Path) -> set[str]:
    return {chunk.chunk_id for chunk in AnsweredRows(folder / "key", OPTIONS).prompts.chunks}


def left_over(folder: Path) -> list[Path]:
    here = (folder / "key" / ".building").iterdir()
    return [path for path in here if path.name not in planned(folder)]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_a_source_whose_prompts_are_not_all_answered_keeps_its_earlier_answers(
    tmp_path: Path,
) -> None:
    folder = answered(tmp_path)
    tokenised(tmp_path)
    prompts_of(folder, [user("And now?"), *ROWS[1:]], OPTIONS)
    assert old_answers(tmp_path) == []
