"""What goes wrong in our own hook is an answer to our requests, and nothing to those of others."""

import json
from types import SimpleNamespace

import pytest

from draftstates.capture.admission import answering
from draftstates.capture.recorder import Recorder
from draftstates.capture.taps import Reading
from draftstates.extract import protocol
from draftstates.extract.protocol import ANSWER_KEY, Destination

OURS = Destination(file="a", first_row=0, rows=3, ids_hash="x", attempt="1").rid


def failing(*args: object, **kwargs: object) -> object:
    raise RuntimeError("no such state")


@pytest.mark.parametrize("by_name", [False, True])
def test_an_exception_of_ours_is_answered_and_ends_nothing(by_name: bool) -> None:
    batch = SimpleNamespace(rids=[OURS, "of-others"])
    result = SimpleNamespace(customized_info={"of_others": ["a", "b"]})
    positional = ["ids", "hidden", "head"] + ([] if by_name else [batch])
    named = {"logits_metadata": batch} if by_name else {}
    hook = answering(failing, version="1")
    assert hook(result, "processor", *positional, **named) is result
    mine, other = map(json.loads, result.customized_info[ANSWER_KEY])
    assert mine["error"] == "the plug-in failed: RuntimeError: no such state"
    assert mine["plugin"] == "1"
    assert other == {}
    assert result.customized_info["of_others"] == ["a", "b"]


@pytest.mark.parametrize("rids", [["of-others"], [], None])
def test_requests_of_others_alone_see_nothing_of_it(rids: list | None) -> None:
    result = SimpleNamespace(customized_info=None)
    hook = answering(failing, version="1")
    assert hook(result, "processor", "i", "h", "l", SimpleNamespace(rids=rids)) is result
    assert result.customized_info is None


def test_a_refused_request_is_not_written_and_its_neighbour_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorder asks before it opens a file."""
    monkeypatch.setenv("DRAFTSTATES_SERVER", "1:2:name")
    other = Destination(file="b", first_row=0, rows=2, ids_hash="y", attempt="1")
    recorder = Recorder.__new__(Recorder)
    recorder._switch = None
    recorder._admission = SimpleNamespace(
        refusal=lambda destination: "the weights were changed" if destination.file == "a" else None
    )
    opened, copied = [], []
    recorder._destinations = SimpleNamespace(open=lambda file: opened.append(file) or file)
    recorder._copy = lambda segments, *rest, **more: copied.extend(segments)
    batch = SimpleNamespace(
        extend_prefix_lens_cpu=[0, 0], extend_seq_lens_cpu=[3, 2], input_ids=None
    )
    destinations = [protocol.parse_rid(OURS), other]
    first, second = recorder._record(batch, destinations, Reading((1,)), None)
    assert first["error"] == "the weights were changed"
    assert "error" not in second
    assert opened == ["b"]
    assert [(segment[0].file, segment[2]) for segment in copied] == [("b", 3)]
