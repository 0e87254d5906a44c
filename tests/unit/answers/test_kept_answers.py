"""Answers on the disk: damage is noticed, and earlier ones are found without reading all."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from answer_kit import answer_all, asking, prompts_of, says, stub_server, user
from captured import tiny_model
from token_kit import run_script, tokenizer_folder

from draftstates.answers import journal
from draftstates.answers.chat import Reply
from draftstates.answers.journal import Journal
from draftstates.answers.key import answers_folder
from draftstates.config import load
from draftstates.errors import UserError
from draftstates.records import Prompts
from draftstates.tokens.answered import (
    AnsweredRows,
    read_answers,
    read_prompts,
    write_answers,
)

ROWS = [user(f"What is {n}+{n}?") for n in range(4)]


def made(folder: Path, **chosen: Any) -> list[Path]:
    """Answer four prompts in chunks of one or two; return the chunks' files."""
    options = asking(chunk=1, **chosen)
    prompts_of(folder, ROWS, options)
    with stub_server(lambda ids: says("Four.<|im_end|>")) as server:
        answer_all(folder, options, server.url)
    return sorted((folder / "key").glob("*.parquet"))


def test_any_flipped_bit_of_answers_and_prompts_is_noticed(tmp_path: Path) -> None:
    def read_all(path: Path) -> list[dict[str, Any]]:
        if path.stem == "prompts":
            return list(read_prompts(path, 0, len(ROWS)))
        return read_answers(path)[0].to_pylist()

    for file in (made(tmp_path)[0], tmp_path / "prompts.parquet"):
        before, whole = read_all(file), file.read_bytes()
        # the pages lie between the first mark and the footer
        pages = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        noticed = 0
        for place in range(4, pages, max(1, pages // 60)):
            damaged = bytearray(whole)
            damaged[place] ^= 4
            file.write_bytes(damaged)
            try:
                assert read_all(file) == before, f"{file.name}: byte {place}"
            except UserError as error:
                noticed += str(file) in str(error)
        file.write_bytes(whole)
        assert noticed > 30, file.name


def test_a_damaged_line_of_a_journal_is_answered_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as kept:
        for name in "pqr":
            asyncio.run(kept.add((name, 0, 0, "h"), Reply([15, 6], [-0.5, -0.25], "stop", 0)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"[15, 6]", b"[17, 6]") + lines[2])
    with Journal(path) as kept:
        assert [key[0] for key in kept.answers] == ["p", "r"]
    assert "it has changed since it was written" in capsys.readouterr().err


def test_of_earlier_chunks_only_those_with_a_wanted_prompt_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = made(tmp_path)
    assert len(files) > 1
    (wanted,) = {row["prompt_id"] for row in read_answers(files[0])[0].to_pylist()[:1]}
    read, looked = journal._in_chunk, []
    monkeypatch.setattr(
        journal, "_in_chunk", lambda path, ids: looked.append(path) or read(path, ids)
    )
    found = journal.earlier_answers(tmp_path / "key", wanted=[wanted], planned=[])
    assert [key[0] for key in found] == [wanted]
    assert looked == files[:1]


def test_a_new_journals_folders_are_synced_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(journal, "sync", synced.append)
    path = tmp_path / "key" / ".building" / "chunk" / "journal.jsonl"
    with Journal(path) as kept:
        assert synced == [path.parent, path.parent.parent, tmp_path / "key"]
        asyncio.run(kept.add(("p", 0, 0, "h"), Reply([1], [-0.5], "stop", 0)))


def test_the_step_leases_a_server_for_a_prompt_without_an_answer_alone(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_folder("smollm2") / name, model)

    def step(rows: list[Any], url: str) -> None:
        prompts_of(tmp_path, rows, asking())
        config = {
            "data": {
                "sources": [{"name": "chats", "files": ["x"], "answers": {}}],
                "max_tokens": 512,
            },
            "model": {"path": str(model)},
            "capture": {},
            "server": {"launcher": "external", "url": url},
            "results": str(tmp_path / "results"),
        }
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(config))
        folder = tmp_path / answers_folder(load(file), "chats")
        (chunk,) = Prompts.read(tmp_path / "prompts.json").chunks
        given = ["--config", file, "--source", "chats", "--prompts", tmp_path / "prompts.parquet"]
        given += ["--chunk-id", chunk.chunk_id, "--output", folder / f"{chunk.chunk_id}.parquet"]
        run_script("answers.py", *given)
        assert (folder / f"{chunk.chunk_id}.parquet").exists()

    with stub_server(lambda ids: says("Four.<|im_end|>")) as server:
        step(ROWS, server.url)
        assert len(server.requests) == len(ROWS)
    # no server is there
    step(ROWS[1:], server.url)
    with pytest.raises(SystemExit):
        step([*ROWS, user("And now?")], server.url)


def test_the_rate_counts_what_was_timed_and_jobs_at_once_share_their_time(tmp_path: Path) -> None:
    files = made(tmp_path)
    jobs = [{"began": 100.0 + 10 * n, "seconds": 20.0, "sampled_tokens": 50} for n in (0, 1)]
    # what a chunk takes from earlier ones takes no time, and is not counted in the rate
    jobs += [{"began": 900.0, "seconds": 0.0, "sampled_tokens": 0}] * (len(files) - 2)
    for file, job in zip(files, jobs, strict=True):
        write_answers(read_answers(file)[0].to_pylist(), job, file)
    rows = AnsweredRows(tmp_path / "key", asking(chunk=1))
    assert len(list(rows.results())) == len(ROWS)
    account = rows.account()
    assert (account["seconds"], account["timed_tokens"], account["folder"]) == (30.0, 100, "key")
    assert account["sampled_tokens"] == len(ROWS) * len(says("Four.<|im_end|>"))
