"""The recorder writes what the taps read, hands on memory of our own, and answers a request whose
states it cannot use.
"""

import base64
import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import capture_spec
from toy_model import FILE, LAYERS, TOKENS, Complete, Model, Pair, batch, expected

from draftstates.capture import taps
from draftstates.capture.admission import Admission
from draftstates.capture.blocks import BlockPool
from draftstates.capture.files import DestinationFile, Destinations
from draftstates.capture.own_capture import OwnCapture
from draftstates.capture.recorder import Recorder
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.taps import Reading, Taps
from draftstates.capture.writer import Writers
from draftstates.errors import UserError
from draftstates.extract import protocol
from draftstates.extract.protocol import Destination
from draftstates.shards import layout
from draftstates.verify import opinions


@pytest.fixture(autouse=True)
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSTATES_SERVER", "1:2:name")


def _recorder(final_norm: str) -> Recorder:
    spec = capture_spec(
        layers=(1, 4), num_layers=4, hidden_size=8, final_norm=final_norm, stored_dtype="float32"
    )
    settings = CaptureSettings(root=Path("/nonexistent"), spec=spec)
    return Recorder(settings, Admission(settings))


def test_the_final_state_is_a_copy_that_the_models_buffer_cannot_change() -> None:
    states = torch.randn(5, 8)
    final = _recorder("post_norm")._final(states, Reading((1, 4)))
    kept = states.clone()
    states.zero_()
    assert torch.equal(final, kept)


def test_the_pre_norm_state_is_r_n_in_rows_of_its_own() -> None:
    rows = torch.randn(5, 2, 8)
    reading = Reading((1, 4), rows=rows, read={1, 4})
    final = _recorder("pre_norm")._final(torch.zeros(5, 8), reading)
    assert torch.equal(final, rows[:, 1])
    assert final.is_contiguous()


def test_a_request_whose_states_were_not_read_is_answered_with_the_reason() -> None:
    """And with the server's name, whatever the answer."""
    ours = Destination(file="a", first_row=0, rows=5, ids_hash="i", attempt="1")
    batch = SimpleNamespace(
        extend_prefix_lens_cpu=[0, 0], extend_seq_lens_cpu=[5, 3], input_ids=torch.arange(8)
    )
    reading = Reading((1, 4), error="r_1: expected 8 rows")
    answers = _recorder("post_norm")._record(batch, [ours, None], reading, torch.zeros(8, 8))
    assert answers[0]["error"] == "r_1: expected 8 rows"
    assert answers[0]["server"] == "name"
    assert answers[1] == {}


def test_a_request_beside_one_that_turns_the_whole_batch_is_answered(tmp_path: Path) -> None:
    """With longrope SGLang rotates all rows of a batch as those of its longest request."""
    ours = Destination(file=FILE, first_row=0, rows=TOKENS, ids_hash="i", attempt="1")
    recorder = _running(tmp_path, Model(Pair))
    asked = SimpleNamespace(
        extend_prefix_lens_cpu=[0, 90],
        extend_seq_lens_cpu=[TOKENS, 11],
        input_ids=torch.arange(TOKENS + 11),
    )
    rows = torch.zeros(TOKENS + 11, 3, 8)
    for switch, refused in ((101, False), (100, True), (None, False)):
        recorder._switch = switch
        reading = Reading((0, 2, 4), rows=rows)
        answer = recorder._record(asked, [ours, None], reading, torch.zeros(TOKENS + 11, 8))[0]
        assert (
            "a request of 101 tokens is in the same batch" in answer.get("error", "")
        ) == refused


@pytest.mark.parametrize("file", ["../a", ".building/\0", ".building/\ud800", "x" * 5000, ""])
def test_a_path_that_cannot_be_written_is_answered(tmp_path: Path, file: str) -> None:
    ours = Destination(file=file, first_row=0, rows=5, ids_hash="i", attempt="1")
    batch = SimpleNamespace(
        extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[5], input_ids=torch.arange(5)
    )
    (tmp_path / ".building").mkdir()
    recorder = _running(tmp_path / "root", Model(Pair))
    answers = recorder._record(batch, [ours], Reading((0, 2, 4)), torch.zeros(5, 8))
    assert answers[0]["error"]


def _running(root: Path, model: Model, **changes: Any) -> Recorder:
    """Return a recorder of r_0, r_2 and r_N as it is after loading, and lay its shard out.

    Args:
        changes: other values of the capture, such as final_state.
    """
    asked = {"layers": (0, 2, 4), "final_norm": "post_norm", **changes}
    spec = capture_spec(num_layers=LAYERS, hidden_size=8, stored_dtype="float32", **asked)
    (root / FILE).parent.mkdir(parents=True)
    layout.create(
        root / FILE,
        spec=spec,
        shard_id="s",
        sample_ids=["a"],
        lengths=[TOKENS],
        input_ids=np.arange(TOKENS, dtype=np.int32),
        loss_mask=np.ones(TOKENS),
    )
    # Blocks of two rows: a sample lies in several.
    settings = CaptureSettings(root=root, spec=spec, block_bytes=300)
    recorder = Recorder(settings, Admission(settings))
    recorder._taps = Taps(
        model,
        layers=spec.residual_layers,
        num_layers=LAYERS,
        hidden_size=8,
        dtype=torch.float32,
        final_norm=spec.final_norm,
    )
    own = OwnCapture(model, [2] if spec.residual_layers else [])
    recorder._own, recorder._final_scale, recorder._stream = own, 1.0, None
    recorder._destinations = Destinations(settings)
    recorder._writers = Writers(recorder._destinations, threads=1)
    recorder._pool = BlockPool(total_bytes=1 << 12, block_bytes=300, pinned=False)
    return recorder


@torch.no_grad()
def test_a_pass_of_the_model_becomes_rows_on_the_disk_and_second_opinions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(Pair)
    recorder, ids = _running(tmp_path, model), torch.arange(TOKENS)
    states = expected(model, ids)
    asked = batch()
    final, aux = model(ids, None, asked)
    result = SimpleNamespace(customized_info=None)
    recorder.after_logits(result, None, ids, final, None, asked, aux)
    (text,) = result.customized_info[protocol.ANSWER_KEY]
    answer = json.loads(text)
    assert "error" not in answer
    assert answer["no_capture"] == ""
    assert sorted(answer["opinions"]) == ["r_2", "r_4"]
    assert max(answer["opinions"].values()) < 1e-6
    shard, reader = layout.Shard(tmp_path / FILE), _receipts(tmp_path)
    assert reader[0].checksum == shard.checksum(0)
    for position, k in enumerate((0, 2, 4)):
        torch.testing.assert_close(shard.sample(0)["hidden_states"][:, position], states[k])
    assert torch.equal(shard.sample(0)["final_hidden_state"], final)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [False, True])
def test_a_stale_residual_that_is_added_to_r_n_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Cohere's norm hands its second argument on unread, and the layers' residual is stale."""
    if wrong:
        monkeypatch.setattr(taps, "adds_its_residual", lambda norm: True)
    model = Model(Complete, adds=False)
    recorder, ids, asked = _running(tmp_path, model, layers=(0, 4)), torch.arange(TOKENS), batch()
    recorder._own = OwnCapture(model, [])
    (final, _), result = model(ids, None, asked), SimpleNamespace(customized_info=None)
    recorder.after_logits(result, None, ids, final, None, asked)
    answer = SimpleNamespace(**json.loads(result.customized_info[protocol.ANSWER_KEY][0]))
    spec, text = recorder._settings.spec, {"model_type": "cohere"}
    if wrong:
        with pytest.raises(UserError, match="^r_4: the model's own norm of it differs by"):
            opinions.check([answer], spec=spec, text=text)
        return
    assert opinions.check([answer], spec=spec, text=text)["norm_distance"] < 1e-6
    rows = layout.Shard(tmp_path / FILE).sample(0)["hidden_states"]
    torch.testing.assert_close(rows[:, 1], expected(model, ids)[LAYERS])


@torch.no_grad()
@pytest.mark.parametrize("spoilt", ["nothing", "own capture", "final state", "no number"])
def test_every_chunk_of_a_prompt_is_judged_though_the_last_alone_is_answered(
    tmp_path: Path, spoilt: str
) -> None:
    torch.manual_seed(0)
    model = Model(Pair)
    recorder, answers = _running(tmp_path, model), []
    for start, length in ((0, 2), (2, 1), (3, 2)):
        asked, ids = batch(), torch.arange(start, start + length)
        asked.extend_prefix_lens_cpu, asked.extend_seq_lens_cpu = [start], [length]
        final, aux = model(ids, None, asked)
        if start == 0:
            final = final + (spoilt == "final state")
            aux = [rows + (spoilt == "own capture") for rows in aux]
            aux = [rows * float("nan") if spoilt == "no number" else rows for rows in aux]
        result = SimpleNamespace(customized_info=None)
        recorder.after_logits(result, None, ids, final, None, asked, aux)
        answers.append(json.loads(result.customized_info[protocol.ANSWER_KEY][0]))
    found = answers[-1]["opinions"]
    far = {name for name, distance in found.items() if not distance < 1e-6}
    assert (
        far
        == {
            "nothing": set(),
            "own capture": {"r_2"},
            "final state": {"r_4"},
            "no number": {"r_2"},
        }[spoilt]
    )
    assert sorted(found) == ["r_2", "r_4"]
    assert not recorder._judged


@torch.no_grad()
def test_a_chunk_whose_earlier_rows_nobody_judged_is_answered_with_that(tmp_path: Path) -> None:
    model = Model(Pair)
    recorder, asked, ids = _running(tmp_path, model), batch(), torch.arange(3, 5)
    asked.extend_prefix_lens_cpu, asked.extend_seq_lens_cpu = [3], [2]
    final, aux = model(ids, None, asked)
    result = SimpleNamespace(customized_info=None)
    recorder.after_logits(result, None, ids, final, None, asked, aux)
    (text,) = result.customized_info[protocol.ANSWER_KEY]
    assert "no second reading of the rows before row 3" in json.loads(text)["error"]


@torch.no_grad()
@pytest.mark.parametrize("kind", [protocol.PLAIN, protocol.SELF_TEST])
def test_without_final_states_the_receipt_holds_that_of_the_last_row(
    tmp_path: Path, kind: str
) -> None:
    """The sample lies in several blocks: the last one's last row is it."""
    model = Model(Pair)
    recorder, ids = _running(tmp_path, model, final_state=False), torch.arange(TOKENS)
    states, asked = expected(model, ids), batch(kind)
    final, aux = _forward(model, ids, asked)
    recorder.after_logits(SimpleNamespace(customized_info=None), None, ids, final, None, asked, aux)
    (receipt,), shard = _receipts(tmp_path), layout.Shard(tmp_path / FILE)
    assert "final_hidden_state" not in shard.sample(0)
    assert receipt.checksum == shard.checksum(0)
    for position, k in enumerate((0, 2, 4)):
        torch.testing.assert_close(shard.sample(0)["hidden_states"][:, position], states[k])
    last = torch.frombuffer(bytearray(base64.b64decode(receipt.last_state)), dtype=torch.float32)
    assert torch.equal(last, final[-1])


class _SideStream:
    """A side stream that notes when it waits for the model's stream, and copies at once."""

    def __init__(self, happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._happened = happened
        event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the model's")
        monkeypatch.setattr(torch.cuda, "stream", self._entered)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)

    def _entered(self, stream: object) -> contextlib.nullcontext:
        self._happened.append("copy")
        return contextlib.nullcontext()

    def wait_stream(self, stream: object) -> None:
        self._happened.append(f"wait for {stream}")


@torch.no_grad()
def test_the_side_stream_copies_no_last_state_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's stream gathers the last states of each block."""
    recorder, happened = _running(tmp_path, Model(Pair), final_state=False), []
    recorder._stream = _SideStream(happened, monkeypatch)
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda rows: happened.append("gather") or stack(rows))
    asked = SimpleNamespace(
        extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[TOKENS], input_ids=torch.arange(TOKENS)
    )
    ours = Destination(file=FILE, first_row=0, rows=TOKENS, ids_hash="i", attempt="1")
    rows, final = torch.randn(TOKENS, 3, 8), torch.randn(TOKENS, 8)
    recorder._record(asked, [ours], Reading((0, 2, 4), rows=rows), final)
    _receipts(tmp_path)
    assert len(happened) > 3
    assert happened == ["gather", "wait for the model's", "copy"] * (len(happened) // 3)


@torch.no_grad()
@pytest.mark.parametrize("kind", [protocol.PLAIN, protocol.SELF_TEST])
@pytest.mark.parametrize("final_norm", ["post_norm", "pre_norm"])
def test_without_layers_the_final_state_is_written_alone(
    tmp_path: Path, kind: str, final_norm: str
) -> None:
    """The self-test still holds the final state against the model's norm of r_N."""
    model = Model(Pair)
    recorder = _running(tmp_path, model, layers=(), final_norm=final_norm)
    ids, asked = torch.arange(TOKENS), batch(kind)
    states = expected(model, ids)
    final, aux = _forward(model, ids, asked)
    result = SimpleNamespace(customized_info=None)
    recorder.after_logits(result, None, ids, final, None, asked, aux)
    answer = json.loads(result.customized_info[protocol.ANSWER_KEY][0])
    assert "error" not in answer
    if kind == protocol.SELF_TEST:
        assert list(answer["opinions"]) == ["r_4"] and answer["opinions"]["r_4"] < 1e-6
        assert answer["no_capture"] == "it reaches none of the captured layers"
    (receipt,), shard = _receipts(tmp_path), layout.Shard(tmp_path / FILE)
    assert receipt.last_state is None
    assert receipt.checksum == shard.checksum(0)
    assert "hidden_states" not in shard.sample(0)
    right = final if final_norm == "post_norm" else states[4]
    torch.testing.assert_close(shard.sample(0)["final_hidden_state"], right)


@torch.no_grad()
def test_without_layers_a_pass_that_no_tap_saw_is_answered_too(tmp_path: Path) -> None:
    recorder = _running(tmp_path, Model(Pair), layers=())
    asked, result = batch(protocol.PLAIN), SimpleNamespace(customized_info=None)
    recorder.after_logits(result, None, asked.input_ids, torch.randn(TOKENS, 8), None, asked)
    (text,) = result.customized_info[protocol.ANSWER_KEY]
    assert "no tap saw this pass" in json.loads(text)["error"]
    assert not protocol.growing_receipts(tmp_path / FILE).exists()


def _forward(
    model: Model, ids: torch.Tensor, asked: object
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Return the final state, and SGLang's own capture where the pass has one."""
    found = model(ids, None, asked)
    return found if isinstance(found, tuple) else (found, None)


def _receipts(root: Path) -> list[protocol.Receipt]:
    reader = protocol.ReceiptReader(protocol.growing_receipts(root / FILE))
    deadline, found = time.monotonic() + 10, []
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = reader.new()
    return found


@torch.no_grad()
def test_a_pass_that_no_tap_saw_is_answered_and_nothing_is_written(tmp_path: Path) -> None:
    model = Model(Pair)
    recorder, asked = _running(tmp_path, model), batch(protocol.PLAIN)
    result = SimpleNamespace(customized_info=None)
    recorder.after_logits(result, None, asked.input_ids, torch.randn(TOKENS, 8), None, asked)
    (text,) = result.customized_info[protocol.ANSWER_KEY]
    assert "no tap saw this pass" in json.loads(text)["error"]
    assert not protocol.growing_receipts(tmp_path / FILE).exists()


@torch.no_grad()
@pytest.mark.parametrize("shared", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [protocol.PLAIN, protocol.COMPARING])
def test_shared_rows_do_not_leave_the_device_unless_they_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int, kind: str
) -> None:
    """They are not copied to a block; another program's request in the batch is not either."""
    model = Model(Pair)
    recorder, copied = _running(tmp_path, model), []
    fill = recorder._fill
    monkeypatch.setattr(
        recorder, "_fill", lambda pairs: copied.extend(b for _, b in pairs) or fill(pairs)
    )
    rows, final = torch.randn(TOKENS + 5, 3, 8), torch.randn(TOKENS + 5, 8)
    child = Destination(
        file=FILE, first_row=0, rows=TOKENS, shared=shared, ids_hash="i", attempt="1", kind=kind
    )
    monkeypatch.setattr(
        DestinationFile,
        "shared_rows",
        lambda _, first, start, rows: {
            "hidden_states": torch.ones(rows, 3, 8),
            "final_hidden_state": torch.ones(rows, 8),
        },
    )
    asked = SimpleNamespace(
        extend_prefix_lens_cpu=[0, 0],
        extend_seq_lens_cpu=[5, TOKENS],
        input_ids=torch.arange(TOKENS + 5),
    )
    recorder._record(asked, [None, child], Reading((0, 2, 4), rows=rows), final)
    (receipt,) = _receipts(tmp_path)
    assert receipt.rows == TOKENS - shared
    compared = kind == protocol.COMPARING
    assert receipt.again_rows == (shared if compared else 0)
    assert (receipt.again_distance > 0) == compared
    for source, dimensions in ((rows, 3), (final, 2)):
        found = torch.cat([part for part in copied if part.ndim == dimensions])
        assert torch.equal(found, source[5 if compared else 5 + shared :])
    shard = layout.Shard(tmp_path / FILE)
    assert torch.equal(shard.state_rows("hidden_states", 0, TOKENS - shared), rows[5 + shared :])
