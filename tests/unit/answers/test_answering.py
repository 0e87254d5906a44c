"""From prompts to samples, with a server of ready answers."""

import asyncio
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answer_kit import StubServer, answer_all, asking, prompts_of, says, stub_server, user
from fuzz import flip_in_column
from token_kit import real_template, run_script, server_ids, template, tokenizer_folder

from draftstates.answers import client
from draftstates.answers.answer import answer_chunk
from draftstates.answers.chat import Chat, Reply
from draftstates.answers.client import AnswerClient, NoAnswer, read_reply
from draftstates.answers.journal import Journal, remove_journals
from draftstates.answers.parser import Parser
from draftstates.answers.prompts import SPARE, Prompt, write_prompts
from draftstates.config import Sampling
from draftstates.errors import UserError
from draftstates.extract.progress import running
from draftstates.records import Prompts
from draftstates.tokens.accounting import RowResult
from draftstates.tokens.answered import AnsweredRows, read_answers
from draftstates.tokens.turns import Sample

END = "<|im_end|>"
ROWS = [user("What is 2+2?"), user("And 3+3?"), user("Name a colour.")]


def answer(say=lambda ids: says("Four." + END)):
    return stub_server(say)


def results(folder: Path, options) -> list[RowResult]:
    return list(AnsweredRows(folder / "key", options).results())


def answered(
    folder: Path, rows: list, say=lambda ids: says("Four." + END), *, name="smollm2", **chosen
) -> tuple[list[RowResult], StubServer]:
    """Answer these rows; return the results of the rows, and the server."""
    options = asking(**chosen)
    prompts_of(folder, rows, options, name=name)
    with stub_server(say) as server:
        answer_all(folder, options, server.url, name=name)
    return results(folder, options), server


def only_sample(result: RowResult) -> Sample:
    ((_, sample),) = result.samples
    return sample


def supervised(sample: Sample) -> list[int]:
    return sample.input_ids[sample.loss_mask == 1].tolist()


def test_a_sample_is_the_sent_and_the_sampled_ids_as_they_are(tmp_path) -> None:
    # no tokenizer gives these ids for this text
    odd = [*says("F"), *says("o"), *says("ur"), *says(END)]
    found, server = answered(tmp_path, [user("What is 2+2?")], lambda ids: odd)
    prompt = server_ids(template("smollm2"), user("What is 2+2?")["messages"], prompt=True)
    assert server.requests[0]["input_ids"] == prompt
    sample = only_sample(found[0])
    assert sample.input_ids.tolist() == prompt + odd
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * len(odd)
    assert sample.logprobs.tolist() == [-0.5] * len(odd)
    assert sample.temperature == pytest.approx(0.7)


def test_the_request_names_the_end_tokens_and_the_sampling(tmp_path) -> None:
    sampling = {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "max_new_tokens": 9}
    _, server = answered(tmp_path, ROWS[:1], sampling=sampling)
    sent = server.requests[0]["sampling_params"]
    assert sent.pop("stop_token_ids") == sorted(template("smollm2").ends.ids)
    assert sent == sampling
    assert server.requests[0]["return_logprob"] is True


def test_each_turn_goes_on_from_the_sampled_ids(tmp_path) -> None:
    replies = [[*says("F"), *says("our"), *says(END)], says("Six." + END)]
    asked: list[list[int]] = []

    def say(ids: list[int]) -> list[int]:
        asked.append(ids)
        return replies[len(asked) - 1]

    found, _ = answered(tmp_path, [user("What is 2+2?", "And 3+3?")], say)
    bridge = says("\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n")
    assert asked[1] == asked[0] + replies[0] + bridge
    sample = only_sample(found[0])
    assert sample.input_ids.tolist() == asked[1] + replies[1]
    assert supervised(sample) == replies[0] + replies[1]
    assert "Theirs" not in template("smollm2").tokenizer.decode(sample.input_ids)


def test_the_last_turn_alone_is_answered_on_the_datas_own_answers(tmp_path) -> None:
    found, server = answered(tmp_path, [user("What is 2+2?", "And 3+3?")], turns="last")
    assert len(server.requests) == 1
    assert "Theirs" in template("smollm2").tokenizer.decode(server.requests[0]["input_ids"])
    assert supervised(only_sample(found[0])) == says("Four." + END)


def test_where_the_template_drops_thoughts_each_turn_is_a_sample(tmp_path) -> None:
    def say(ids: list[int]) -> list[int]:
        return says("<think>\nEasy.\n</think>\n\nFour.<|im_end|>", name="qwen3")

    row = user("What is 2+2?", "And 3+3?")
    found, server = answered(tmp_path, [row], say, name="qwen3")
    history = [row["messages"][0], {"role": "assistant", "content": "Four."}, row["messages"][2]]
    # what a server renders that gets the messages: without the thought
    second = server_ids(template("qwen3"), history, prompt=True)
    assert server.requests[1]["input_ids"] == second
    samples = [sample for _, sample in found[0].samples]
    assert [supervised(sample) for sample in samples] == [say([]), say([])]
    assert samples[1].input_ids.tolist() == second + say([])
    (file,) = (tmp_path / "key").glob("*.parquet")
    first, _ = read_answers(file)[0].to_pylist()
    assert (first["text"], first["reasoning"]) == ("Four.", "Easy.")


def test_a_cut_answer_gains_no_end_token(tmp_path) -> None:
    long = says("One two three four five six seven eight nine ten." + END)
    found, server = answered(
        tmp_path, [user("Count.", "Go on.")], lambda ids: long, sampling={"max_new_tokens": 4}
    )
    sample = only_sample(found[0])
    assert supervised(sample) == long[:4] * 2
    # the template's end of the turn is there for the next turn, and is not learnt
    first = len(server.requests[0]["input_ids"]) + 4
    assert sample.input_ids[first] == says(END)[0]
    assert sample.loss_mask[first] == 0
    assert sample.input_ids[-1] == long[3]


def test_a_cut_answer_is_left_out_where_the_configuration_says_skip(tmp_path) -> None:
    long = says("One two three four five six seven eight nine ten." + END)
    chosen = {"truncated": "skip", "sampling": {"max_new_tokens": 4}}
    found, server = answered(tmp_path, [user("Count.", "Go on.")], lambda ids: long, **chosen)
    assert found[0].skipped.reason == "truncated"
    assert len(server.requests) == 1


def test_an_answer_is_cut_where_the_sample_would_be_too_long(tmp_path) -> None:
    found, server = answered(tmp_path, ROWS[:1], lambda ids: says("word " * 200), max_tokens=64)
    sent = server.requests[0]
    assert len(sent["input_ids"]) + sent["sampling_params"]["max_new_tokens"] == 64 - SPARE
    assert len(only_sample(found[0]).input_ids) == 64 - SPARE


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (END, "empty"),
        ("ha" + " ha" * 60 + END, "one token repeated"),
        (" \n" + END, "end without text"),
    ],
)
def test_degenerate_answers_are_counted_and_can_be_left_out(tmp_path, text: str, kind: str) -> None:
    rows = [user("Say it."), user("What is 2+2?")]

    def say(ids: list[int]) -> list[int]:
        return says(text if says("Say")[0] in ids else "Four." + END)

    options = asking(sampling={"max_new_tokens": 100})
    found, _ = answered(tmp_path, rows, say, sampling={"max_new_tokens": 100})
    assert [len(each.samples) for each in found] == [1, 1]
    rows_ = AnsweredRows(tmp_path / "key", options)
    assert len(list(rows_.results())) == 2
    assert rows_.account()["degenerate"] == {kind: 1}
    without = asking(sampling={"max_new_tokens": 100}, skip_degenerate=True)
    kept = AnsweredRows(tmp_path / "key", without)
    assert [each.skipped and each.skipped.reason for each in kept.results()] == ["degenerate", None]
    account = kept.account()
    assert (account["prompts"], account["answered"], account["skipped"]) == (
        2,
        1,
        {"degenerate": 1},
    )


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'


def with_a_call(a: int) -> dict[str, Any]:
    """Return a row whose data calls a tool and holds the result."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a}}}
    messages = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "four"},
    ]
    return {"messages": messages, "tools": TOOLS}


@pytest.mark.parametrize(
    ("row", "said", "requests", "lost"),
    [
        # the data holds the result of the same call
        (with_a_call(2), CALL, 2, ()),
        (with_a_call(3), CALL, 1, ("tool_call",)),
        # a result, and no call of it
        (with_a_call(2), "Four.<|im_end|>", 1, ("tool_call",)),
        # a call, and the data goes on as if there were none
        ({**user("What is 2+2?", "And 3+3?"), "tools": TOOLS}, CALL, 1, ("tool_call",)),
        ({**user("What is 2+2?"), "tools": TOOLS}, CALL, 1, ()),
    ],
)
def test_a_call_stops_a_conversation_unless_the_data_hold_its_result(
    tmp_path, row: dict, said: str, requests: int, lost: tuple[str, ...]
) -> None:
    def say(ids: list[int]) -> list[int]:
        results = says("<tool_response>", name="qwen3")[0] in ids
        return says("It is four.<|im_end|>" if results else said, name="qwen3")

    found, server = answered(tmp_path, [row], say, name="qwen3")
    assert (len(server.requests), found[0].lost_turns) == (requests, lost)
    text = template("qwen3").tokenizer.decode(found[0].samples[-1][1].input_ids)
    assert ("It is four." in text) == (requests == 2)


def test_an_end_token_that_belongs_to_a_call_closes_it() -> None:
    """gpt-oss ends a call by <|call|>, without which its parser takes the call for a broken one."""
    from renderers.parsing import parse_gpt_oss

    loaded = real_template("openai-gpt-oss-120b")
    marks = ("return", "call", "start", "end", "channel", "message", "constrain")
    named = {f"{mark}_id": loaded.encode(f"<|{mark}|>")[0].item() for mark in marks}

    class Renderer:
        def parse_response(self, ids: list[int], *, tools: Any, prompt_ids: Any) -> Any:
            opened = loaded.encode("<|start|>assistant").tolist()
            return parse_gpt_oss(loaded.tokenizer, [*opened, *ids], **named)

    parser = Parser(loaded)
    parser._renderer, parser.reads_calls = Renderer(), True
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = with_a_call(2)["messages"]
    messages[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    kinds = {"type": "object", "properties": {"a": {"type": "integer"}}}
    add = {"name": "add", "description": "Add.", "parameters": kinds}
    prompt = Prompt(messages, [1, 3], [{"type": "function", "function": add}], {})
    chat = Chat(prompt, loaded, parser, asking().answers, max_tokens=4096)
    said = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>'
    ids = loaded.encode(said).tolist()
    row = chat.add(Reply(ids, [-0.5] * len(ids), "stop", 0))
    assert json.loads(row["calls"]) == [{"name": "add", "arguments": {"a": 2}}]
    assert row["stopped"] is None
    assert chat.prompt_ids is not None


def test_of_two_templates_the_one_of_the_row_says_what_ends_its_answer(tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder("smollm2"), folder, ignore=lambda *_: ["model.safetensors"])
    default = TURNS.replace("SAID", "m.content")
    shown = "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    of_tools = "{{ tools | tojson if tools }}" + TURNS.replace("{{ SAID }}", shown)
    of_tools = of_tools.replace("<|im_end|>", "<|endoftext|>")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": default, "tool_use": of_tools}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    options = asking()
    rows = [user("Hi"), {**user("What is 2+2?"), "tools": TOOLS}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = tmp_path / "prompts.parquet"
    (chunk,) = write_prompts(
        source="chats", paths=[data], tokenizer_path=folder, options=options, output=prompts
    ).chunks
    with stub_server(lambda ids: says("Four." + END)) as server:
        answer_chunk(
            chunk.chunk_id,
            prompts=prompts,
            tokenizer_path=folder,
            options=options,
            url=server.url,
            output=tmp_path / "key" / "answers.parquet",
        )
    ends = [request["sampling_params"]["stop_token_ids"] for request in server.requests]
    both = sorted([*says(END), *says("<|endoftext|>")])
    assert sorted(ends) == sorted([says(END), both])


def test_several_samples_of_a_prompt(tmp_path) -> None:
    counts = iter(range(100))
    found, _ = answered(tmp_path, ROWS, lambda ids: says(f"{next(counts)}." + END), samples=3)
    assert [len(each.samples) for each in found] == [3, 3, 3]


def test_only_new_prompts_are_answered(tmp_path) -> None:
    options = asking(chunk=1)
    prompts_of(tmp_path, ROWS, options)
    with answer() as server:
        answer_all(tmp_path, options, server.url)
        assert len(server.requests) == 3
        changed = [ROWS[0], user("Something else?"), ROWS[2], user("And more?")]
        prompts_of(tmp_path, changed, options)
        answer_all(tmp_path, options, server.url)
        assert len(server.requests) == 5
        prompts_of(tmp_path, ROWS[1:], options)
        answer_all(tmp_path, options, server.url)
        assert len(server.requests) == 5
    assert [len(each.samples) for each in results(tmp_path, options)] == [1, 1]


TURNS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role ==
'assistant' %}{{ SAID }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if
add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
THOUGHT = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{THOUGHT} + m.content", "m.content"),
        ("m.content", "m.content.split('</think>')[-1]"),
        ("m.content", "m.content | trim"),
    ],
)
def test_a_template_that_shows_earlier_thoughts_otherwise_asks_other_prompts(
    tmp_path, before: str, after: str
) -> None:
    ids = []
    for number, said in enumerate((before, before, after)):
        file = tmp_path / f"{number}.jinja"
        file.write_text(TURNS.replace("SAID", said))
        options = asking().model_copy(update={"chat_template": file})
        rows = [user("Hi", "And then?")]
        ids.append(prompts_of(tmp_path / str(number), rows, options).chunks[0].chunk_id)
    assert ids[0] == ids[1] != ids[2]


def test_a_changed_chunk_takes_the_answers_that_others_hold(tmp_path) -> None:
    options = asking(chunk=2048)
    prompts_of(tmp_path, ROWS, options)
    with answer() as server:
        answer_all(tmp_path, options, server.url)
        # with a prompt less, no server is needed
        prompts_of(tmp_path, ROWS[1:], options)
        (figures,) = answer_all(tmp_path, options, None)
        assert (figures["answers"], figures["sampled_tokens"]) == (2, 0)
        prompts_of(tmp_path, [*ROWS, user("New?")], options)
        assert answer_all(tmp_path, options, None) == [None]
        answer_all(tmp_path, options, server.url)
    assert len(server.requests) == 4
    assert [len(each.samples) for each in results(tmp_path, options)] == [1] * 4


def test_a_killed_job_loses_no_answer(tmp_path) -> None:
    options = asking(in_flight=1)
    prompts_of(tmp_path, [user("What is 2+2?", "And 3+3?"), *ROWS[1:]], options)
    building = tmp_path / "key" / ".building"
    with answer() as server:
        child = os.fork()
        if not child:
            # the third request never gets its answer: the two before it are acknowledged
            server_answers_so_far(server, 2)
            answer_all(tmp_path, options, server.url)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        (journal,) = building.glob("*/journal.jsonl")
        assert journal.read_bytes().count(b"\n") == 2
        with open(journal, "ab") as file:
            file.write(b'["half a li')
        before = len(server.requests)
        answer_all(tmp_path, options, server.url)
        assert len(server.requests) - before == 2
    assert [len(each.samples) for each in results(tmp_path, options)] == [1, 1, 1]


def test_answers_whose_file_snakemake_removes_are_not_asked_again(tmp_path) -> None:
    options = asking(chunk=1)
    prompts_of(tmp_path, ROWS, options)
    with answer() as server:
        answer_all(tmp_path, options, server.url)
        # as after a job that was killed between the publishing of its file and its exit
        for file in (tmp_path / "key").glob("*.parquet"):
            file.unlink()
        answer_all(tmp_path, options, server.url)
    assert len(server.requests) == 3
    assert not running(tmp_path / "key" / ".building")


def test_tokenising_removes_the_journals_of_finished_chunks(tmp_path) -> None:
    options = asking(chunk=1)
    chunks = prompts_of(tmp_path, ROWS, options).chunks
    with answer() as server:
        answer_all(tmp_path, options, server.url)
    building = tmp_path / "key" / ".building"
    with Journal(building / "of-no-file" / "journal.jsonl"):
        assert len(list(building.iterdir())) == len(chunks) + 1
    source = {"name": "chats", "files": [str(tmp_path / "data.jsonl")], "answers": {"chunk": 1}}
    config = {
        "data": {"sources": [source], "max_tokens": 512},
        "model": {"path": str(tokenizer_folder("smollm2"))},
        "capture": {},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    paths = {
        "config": tmp_path / "config.yaml",
        "tokenizer": tokenizer_folder("smollm2"),
        "output": tmp_path / "tokens.parquet",
        "accounting": tmp_path / "tokens.json",
        "answered": tmp_path / "key",
    }
    given = [part for name, path in paths.items() for part in (f"--{name}", path)]
    run_script("tokenise.py", "--source", "chats", *given)
    assert [path.name for path in building.iterdir()] == ["of-no-file"]
    (building / "of-no-file" / "journal.jsonl").unlink()
    (building / "of-no-file").rmdir()
    remove_journals(tmp_path / "key")
    assert not building.exists()


def server_answers_so_far(server: StubServer, count: int) -> None:
    """Have this process killed when it sends a request after so many acknowledged answers."""
    send, sent = AnswerClient.answer, 0

    async def answer_or_die(client: AnswerClient, *prompt: Any, **room: Any) -> Reply:
        nonlocal sent
        if sent == count:
            os.kill(os.getpid(), signal.SIGKILL)
        sent += 1
        return await send(client, *prompt, **room)

    AnswerClient.answer = answer_or_die


def test_a_server_that_fails_loses_no_finished_answer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(client, "_WAITS", (0.0, 0.0))
    options = asking()
    prompts_of(tmp_path, ROWS, options)
    with answer() as server:
        server.change = lambda body, reply: (
            {"error": "out of memory"} if says(" colour")[0] in body["input_ids"] else reply
        )
        with pytest.raises(UserError, match="1 of 3 prompts got no answer"):
            answer_all(tmp_path, options, server.url)
        assert not list((tmp_path / "key").glob("*.parquet"))
        assert len(server.requests) == 2 + 3
        server.change = lambda body, reply: reply
        answer_all(tmp_path, options, server.url)
        assert len(server.requests) == 2 + 3 + 1
    assert [len(each.samples) for each in results(tmp_path, options)] == [1, 1, 1]


def test_a_server_that_fails_without_closing_its_connections_ends_the_job(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("draftstates.answers.answer._WATCH_SECONDS", 0.05)
    options, failed, over = asking(in_flight=1), tmp_path / "failed.json", threading.Event()
    prompts_of(tmp_path, ROWS, options)

    def say(ids: list[int]) -> list[int]:
        if says(" colour")[0] in ids:
            failed.write_text("{}")
            over.wait(20)
        return says("Four." + END)

    with stub_server(say) as server:
        with pytest.raises(UserError, match="the server has failed; the answers that it gave"):
            answer_all(tmp_path, options, server.url, failed=failed)
        over.set()
    assert len(server.requests) == 3
    (journal,) = (tmp_path / "key" / ".building").glob("*/journal.jsonl")
    assert journal.read_bytes().count(b"\n") == 2


def test_a_request_is_given_up_that_nobody_answers(monkeypatch) -> None:
    monkeypatch.setattr(client, "_REQUEST_SECONDS", 0.0)

    async def ask() -> None:
        async def keep_silent(*_: object) -> None:
            await asyncio.sleep(20)

        silent = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with AnswerClient(url, api_key=None, sampling=Sampling()) as asking_:
            await asking_._send(np.array([1]), 1, [6])

    with pytest.raises(NoAnswer, match="TimeoutError"):
        asyncio.run(asyncio.wait_for(ask(), 10))


def reply_text(output_ids: Any = (5, 6), **changes) -> bytes:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
        "prompt_tokens": 3,
        "cached_tokens": 0,
    }
    return json.dumps({"output_ids": output_ids, "meta_info": {**meta, **changes}}).encode()


def test_a_right_reply_is_read() -> None:
    assert read_reply(reply_text(), sent=3, room=8, stop_ids=[6]).logprobs == [-0.5, -0.25]


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": {"type": "abort"}},
        {"finish_reason": None},
        # cut, but not at its most tokens
        {"finish_reason": {"type": "length"}},
        {"output_token_logprobs": [[-0.5, 5, None]]},
        {"output_token_logprobs": [[-0.5, 5, None], [-0.25, 7, None]]},
        {"output_token_logprobs": [[-0.5, 5, None], [float("nan"), 6, None]]},
        {"output_token_logprobs": [[-0.5, 5, None], [0.1, 6, None]]},
        {"prompt_tokens": 4},
        {"prompt_tokens": 1e999},
        {"cached_tokens": -1},
        {"cached_tokens": 2**40},
        # SGLang's word for a token that it could not sample, in whose place it put an end token
        {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
        {"finish_reason": {"type": "stop", "matched": 5}},
        {"finish_reason": ["stop"]},
        {"output_ids": {"5": 6}},
        {"output_ids": 6},
        {"output_ids": [5, 6.0]},
        {"output_ids": [-1, 6], "output_token_logprobs": [[-0.5, -1, None], [-0.25, 6, None]]},
        {"output_ids": [2**31, 6], "output_token_logprobs": [[-0.5, 2**31, None], [-0.2, 6, None]]},
    ],
)
def test_a_wrong_reply_is_refused(changes: dict) -> None:
    with pytest.raises(NoAnswer, match="the server's answer: expected"):
        read_reply(reply_text(**changes), sent=3, room=8, stop_ids=[6])


@pytest.mark.parametrize("body", [b"", b"\xff{", b"[]", b"null", b"<html>"])
def test_a_body_that_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(NoAnswer, match="the server's answer: expected output_ids"):
        read_reply(body, sent=3, room=8, stop_ids=[6])


def test_an_answer_whose_last_possible_token_ends_it_is_not_cut() -> None:
    text = reply_text(finish_reason={"type": "length"})
    assert read_reply(text, sent=3, room=2, stop_ids=[6]).finish == "stop"
    assert read_reply(text, sent=3, room=2, stop_ids=[7]).finish == "length"


def test_an_answer_that_ends_without_an_end_token_is_refused() -> None:
    with pytest.raises(NoAnswer, match="last token one of .7. where the answer is not cut"):
        read_reply(reply_text(), sent=3, room=8, stop_ids=[7])


def test_two_jobs_do_not_share_a_journal(tmp_path) -> None:
    with Journal(tmp_path / "journal.jsonl"), pytest.raises(UserError, match="another job"):
        Journal(tmp_path / "journal.jsonl")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_has_journals(tmp_path, monkeypatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Journal(tmp_path / "journal.jsonl") as journal:
        asyncio.run(journal.add(("p", 0, 0, "h"), Reply([1], [-0.5], "stop", 0)))
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert list(journal.answers) == [("p", 0, 0, "h")]


def test_a_lock_that_fails_is_no_other_job(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"):
        Journal(tmp_path / "journal.jsonl")


def test_a_write_that_fails_fails_its_whole_batch_and_leaves_no_half_line(
    tmp_path, monkeypatch
) -> None:
    reply, write, room = Reply([1], [-0.5], "stop", 0), os.write, iter([5])

    def on_a_full_disk(file: int, data: bytes) -> int:
        if (left := next(room, None)) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:left])

    async def add(journal: Journal) -> list[BaseException | None]:
        keys = [(name, 0, 0, "h") for name in "pqr"]
        adding = asyncio.gather(*(journal.add(key, reply) for key in keys), return_exceptions=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", on_a_full_disk)
            found = await asyncio.wait_for(adding, 10)
        await journal.add(("s", 0, 0, "h"), reply)
        return found

    with Journal(tmp_path / "journal.jsonl") as journal:
        assert [type(each) for each in asyncio.run(add(journal))] == [OSError] * 3
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert list(journal.answers) == [("s", 0, 0, "h")]


def test_a_prompt_without_its_answer_is_named(tmp_path) -> None:
    options = asking()
    prompts_of(tmp_path, ROWS, options)
    with answer() as server:
        answer_all(tmp_path, options, server.url)
    asked_more = asking(samples=2)
    with pytest.raises(UserError, match="expected the turns of sample 1 of prompt"):
        list(AnsweredRows(tmp_path / "key", asked_more).results())


@pytest.mark.parametrize(
    ("pattern", "column", "expected"),
    [
        ("prompts.parquet", "conversation", "expected prompts"),
        ("prompts.parquet", "row", "expected prompts"),
        ("key/*.parquet", "prompt_ids", "expected a chunk's answers"),
        ("key/*.parquet", "temperature", "expected a chunk's answers"),
    ],
)
def test_prompts_and_answers_that_changed_on_the_disk_are_refused(
    tmp_path, pattern: str, column: str, expected: str
) -> None:
    answered(tmp_path, ROWS)
    (path,) = tmp_path.glob(pattern)
    path.chmod(0o644)
    flip_in_column(path, column)
    with pytest.raises(UserError, match=expected) as error:
        results(tmp_path, asking())
    assert str(path) in str(error.value)


def test_rows_without_a_prompt_are_named(tmp_path) -> None:
    rows = [
        ROWS[0],
        {"messages": [{"role": "system", "content": "Be brief."}]},
        ROWS[0],
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        user("long " * 600),
        "no object",
    ]
    found, _ = answered(tmp_path, rows)
    reasons = [each.skipped.reason if each.skipped else None for each in found]
    assert reasons == [None, "no_prompt", "duplicate", "no_prompt", "too_long", "not_an_object"]


def test_the_datas_answers_are_named_as_not_used(tmp_path) -> None:
    found, _ = answered(
        tmp_path, [{"messages": [*user("Hi")["messages"], {"role": "assistant", "content": "x"}]}]
    )
    assert found[0].not_used == (
        "answers of the data, and what follows the last: the target model answers",
    )


def test_chunks_depend_on_the_prompts_beside_them_alone(tmp_path) -> None:
    rows = [user(f"What is {n} + {n}?") for n in range(60)]
    options = asking(chunk=8)
    before = {chunk.chunk_id for chunk in prompts_of(tmp_path, rows, options).chunks}
    rows[30] = user("Something else?")
    after = {chunk.chunk_id for chunk in prompts_of(tmp_path, rows, options).chunks}
    assert len(before) > 4
    assert 1 <= len(after - before) <= 2
    chunks = Prompts.read(tmp_path / "prompts.json").chunks
    assert (chunks[0].first, chunks[-1].end) == (0, 60)
    assert all(one.end == two.first for one, two in itertools.pairwise(chunks))
