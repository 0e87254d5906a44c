"""The two hooks: after the model is loaded, and after each forward pass's logits.

The second hook runs on the scheduler's thread while the GPU works. It queues copies on a side
stream and hands everything else to the writer threads.

The side stream reads memory of our own alone, which no layer and no later pass writes: the taps
have copied each r_k into one tensor, and this hook copies the final state and the ids. A row costs
K + 1 states written once on the model's stream, and read once by the side stream; where the final
state is not captured, that of a request's last row alone is read.
"""

import importlib.metadata
import json
import sys
from collections import OrderedDict
from math import isnan, nan
from pathlib import Path

import torch

from draftstates.capture import every_layer, kinds, numbers, plugin, siblings, taps
from draftstates.capture.admission import Admission
from draftstates.capture.blocks import BlockPool
from draftstates.capture.every_layer import row_distances
from draftstates.capture.files import DestinationFile, Destinations
from draftstates.capture.own_capture import OwnCapture
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.taps import Reading
from draftstates.capture.writer import Job, Writers
from draftstates.errors import UserError
from draftstates.extract import protocol
from draftstates.extract.protocol import Destination
from draftstates.model import family
from draftstates.model.folder import ModelFolder
from draftstates.model.lengths import switch_length

_IDS_BYTES = 4
_MOST_JUDGED = 64
# SGLang finds the plug-in by the installed package's entry point, so the package has metadata
VERSION = importlib.metadata.version("draftstates")


class Recorder:
    """Recorder of the rows of requests whose id names a destination."""

    def __init__(self, settings: CaptureSettings, admission: Admission) -> None:
        self._settings = settings
        self._admission = admission
        self._dtype = settings.spec.torch_dtype
        self._taps: taps.Taps | None = None
        # Largest distances of the chunks before `start`, of each self-test request under way.
        self._judged: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._writers: Writers | None = None
        # Tokens of a request beyond which SGLang rotates its whole batch otherwise.
        self._switch: int | None = None

    def after_load_model(
        self, result: object, runner: object, *args: object, **kwargs: object
    ) -> None:
        """Have the model hand over its residual stream.

        The rank that writes also makes blocks and threads.
        """
        if getattr(runner, "is_draft_worker", False):
            return
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        asked = runner.server_args
        # SGLang 0.5.17 counts the ranks of data parallel attention in dp_size, 0.5.23 does not.
        dp_size = max(asked.dp_size, parallel.attn_dp_size)
        for reason in kinds.unreachable(runner, parallel):
            plugin.refuse(reason)
        plugin.check_server(dp_size=dp_size, nodes=asked.nnodes)
        settings, spec = self._settings, self._settings.spec
        self._taps = taps.Taps(
            runner.model,
            layers=spec.residual_layers,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            dtype=self._dtype,
            final_norm=spec.final_norm,
        )
        inner = [k for k in spec.residual_layers if 0 < k < spec.num_layers]
        # SGLang's capture sums over ranks that may not see the same requests.
        self._own = OwnCapture(runner.model, inner) if parallel.attn_dp_size == 1 else None
        text = ModelFolder(Path(asked.model_path)).text
        kinds.check_logits(runner.model, family.logits(text))
        self._final_scale = family.final_scale(text)
        self._switch = switch_length(text)
        if parallel.attn_tp_rank != 0:
            return
        plugin.check_loaded_model(asked, runner.model_config, spec=spec)
        self._stream = (
            torch.cuda.Stream() if torch.cuda.is_available() and runner.device == "cuda" else None
        )
        self._destinations = Destinations(settings)
        self._writers = Writers(self._destinations, threads=settings.writers)
        self._pool = BlockPool(
            total_bytes=settings.queue_bytes,
            block_bytes=settings.block_bytes,
            pinned=self._stream is not None,
        )
        if dp_size > 1:
            siblings.watch()
        print(
            f"draftstates {VERSION}: captures r_k for k in {list(spec.residual_layers)} below"
            f" {settings.root}",
            file=sys.stderr,
        )

    def after_logits(
        self,
        result: object,
        processor: object,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: object,
        logits_metadata: object,
        aux_hidden_states: object = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Capture the rows that this forward pass computed for requests with a destination.

        Answer each of these requests in `customized_info`.
        """
        batch = logits_metadata
        reading = self._taps.take(len(hidden_states)) if self._taps else None
        if (
            reading is None
            or self._writers is None
            or not getattr(batch, "rids", None)
            or not batch.forward_mode.is_extend()
        ):
            return result
        destinations = [protocol.parse_rid(rid) for rid in batch.rids]
        if not any(destinations):
            return result
        if reading.rows is None and not reading.error:
            reading.error = "no tap saw this pass: this server computes the model in another way"
        final = self._final(hidden_states, reading)
        answers = self._record(batch, destinations, reading, final)
        self._admission.describe(destinations, answers)
        if taps.is_self_test(batch) and not reading.error:
            self._compare(batch, destinations, reading, hidden_states, aux_hidden_states, answers)
            every = {f"r_{k}": rows for k, rows in reading.every.items()}
            every["post_norm"] = hidden_states[reading.kept.to(hidden_states.device)]
            read, root = reading.kept.tolist(), self._settings.root
            every_layer.keep_rows(batch, destinations, answers, every, read=read, root=root)
        info = dict(result.customized_info or {})
        info[protocol.ANSWER_KEY] = [json.dumps(answer) for answer in answers]
        result.customized_info = info
        return result

    def _final(self, final: torch.Tensor, reading: Reading) -> torch.Tensor:
        """Return the final state as stored, [tokens, H], in memory of our own."""
        if self._settings.spec.final_norm == "pre_norm" and not reading.error:
            final = reading.state(self._settings.spec.num_layers)
        return final.to(self._dtype, copy=True, memory_format=torch.contiguous_format)

    def _record(
        self,
        batch: object,
        destinations: list[Destination | None],
        reading: Reading,
        final: torch.Tensor,
    ) -> list[dict]:
        """Queue the rows of every request with a destination; return one answer per request."""
        answers: list[dict] = []
        segments: list[tuple[Destination, DestinationFile, int, int, int]] = []
        at, misled = 0, reading.error or self._misled(batch)
        for destination, start, length in zip(
            destinations, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False
        ):
            answer: dict = {}
            if destination:
                answer |= {"plugin": VERSION, "server": numbers.server_name()}
            if destination and (refusal := self._admission.refusal(destination) or misled):
                answer["error"] = refusal
                destination = None
            # A decode step in a mixed batch lies past the sample's end and is not captured.
            if destination and start + length <= destination.rows:
                try:
                    segments.append(
                        (destination, self._destinations.open(destination.file), at, start, length)
                    )
                # A path that no system has raises ValueError.
                except (UserError, OSError, ValueError) as error:
                    answer["error"] = str(error)
            answers.append(answer)
            at += length
        if segments:
            self._copy(segments, reading.rows, final, batch.input_ids, rows=at)
        return answers

    def _misled(self, batch: object) -> str:
        """Return why a batch's rows are not those of its requests alone; empty if they are."""
        spans = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False)
        longest = max((start + length for start, length in spans), default=0)
        if self._switch is None or longest <= self._switch:
            return ""
        return (
            f"a request of {longest} tokens is in the same batch, and beyond {self._switch} SGLang"
            " rotates all positions of a batch otherwise (longrope): send no longer requests to"
            " this server"
        )

    def _copy(
        self,
        segments: list,
        hidden: torch.Tensor,
        final: torch.Tensor,
        ids: torch.Tensor,
        *,
        rows: int,
    ) -> None:
        """Copy rows to host blocks, block by block, and give each segment's part to the writers.

        A sample's shared rows are not copied: their places in the block stay as they are.

        Args:
            segments: (destination, file, first row in the batch, first row in the sample, rows) of
                each request.
            hidden: the captured r_k, [tokens, K, H] in the stored dtype.
            final: the final state, [tokens, H] in the stored dtype.
            ids: `input_ids` of the batch.
            rows: rows of the batch.
        """
        layers = hidden.shape[1]
        width = final.shape[-1] * self._dtype.itemsize
        row_bytes = width * (layers + 1) + _IDS_BYTES
        step = self._settings.block_bytes // row_bytes
        if step == 0:
            raise RuntimeError(
                f"draftstates: block_bytes: expected at least one row's {row_bytes} bytes, found"
                f" {self._settings.block_bytes}"
            )
        # SGLang keeps a batch's ids in a buffer that the next batch overwrites, perhaps before the
        # side stream reads it.
        ids = ids[:rows].to(torch.int32, copy=True)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            inside = [s for s in segments if s[2] < end and s[2] + s[4] > begin]
            if not inside:
                continue
            block = self._pool.take(users=len(inside))
            count = end - begin
            finals = final[begin:end]
            if not self._settings.spec.final_state:
                # of each request's rows, the last one's alone
                finals = torch.stack([final[min(at + n, end) - 1] for *_, at, _, n in inside])
            sizes = (count * width * layers, len(finals) * width, count * _IDS_BYTES)
            states, last, tail = block.memory[: sum(sizes)].split(sizes)
            pairs = [(tail, ids[begin:end])]
            if not self._settings.spec.final_state:
                pairs.append((last, finals))
            for first, stop in _kept(inside, begin, end):
                a, b = first - begin, stop - begin
                pairs.append((states[a * width * layers : b * width * layers], hidden[first:stop]))
                if self._settings.spec.final_state:
                    pairs.append((last[a * width : b * width], final[first:stop]))
            # there is nothing to copy of layers where none is captured
            ready = self._fill([(part, source) for part, source in pairs if len(part)])
            for number, (destination, file, at, start, length) in enumerate(inside):
                first, stop = max(at, begin), min(at + length, end)
                a, b = first - begin, stop - begin
                c, d = (a, b) if self._settings.spec.final_state else (number, number + 1)
                self._writers.put(
                    Job(
                        destination=destination,
                        file=file,
                        start=start + first - at,
                        rows=stop - first,
                        chunk_start=first == at,
                        hidden=states[a * width * layers : b * width * layers],
                        final=last[c * width : d * width],
                        ids=tail[a * _IDS_BYTES : b * _IDS_BYTES],
                        block=block,
                        ready=ready,
                    )
                )

    def _fill(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
        """Fill parts of a block with rows; on a GPU, by the side stream.

        Args:
            pairs: uint8 views of the block, and contiguous tensors of our own of as many bytes.

        Returns:
            the event that the copies end with; None on a CPU.
        """
        if self._stream is None:
            for part, source in pairs:
                part.copy_(source.view(torch.uint8).flatten())
            return None
        # here, and not once a batch: some of the sources were queued for this block alone
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for part, source in pairs:
                part.copy_(source.view(torch.uint8).flatten(), non_blocking=True)
                # The allocator must not reuse the source before the side stream has read it.
                source.record_stream(self._stream)
            ready = torch.cuda.Event(blocking=True)
            ready.record(self._stream)
        return ready

    def _compare(
        self,
        batch: object,
        destinations: list,
        reading: Reading,
        final: torch.Tensor,
        aux: object,
        answers: list[dict],
    ) -> None:
        """Add second opinions to each self-test answer: largest row distances by what they judge.

        `r_k` is SGLang's own capture against the tap; `r_N` is the model's own norm of r_N against
        the final state. Where SGLang has no capture of its own, `no_capture` says why. SGLang hands
        on the answer of a prompt's last chunk alone, which has the distances of all its chunks.
        """
        spec = self._settings.spec
        normed = self._taps.normed(reading.state(spec.num_layers).to(final.dtype))
        reason = "its ranks see other requests" if self._own is None else self._own.reason
        own: dict[int, torch.Tensor] = {}
        if not reason:
            own = self._own.states(aux, width=spec.hidden_size)
            reason = "" if own else "it handed over another number of states"
        distances = {f"r_{k}": row_distances(rows, reading.state(k)) for k, rows in own.items()}
        distances[f"r_{spec.num_layers}"] = row_distances(normed * self._final_scale, final)
        at = 0
        for destination, start, length, answer in zip(
            destinations,
            batch.extend_prefix_lens_cpu,
            batch.extend_seq_lens_cpu,
            answers,
            strict=False,
        ):
            if destination and destination.kind == protocol.SELF_TEST:
                found = {
                    name: each[at : at + length].max().item() for name, each in distances.items()
                }
                earlier = self._judged.pop(destination.rid, {"start": 0})
                if earlier.pop("start") != start:
                    answer["error"] = f"no second reading of the rows before row {start}"
                for name, distance in earlier.items():
                    # A NaN is larger than any distance.
                    both = (distance, found.get(name, distance))
                    found[name] = nan if any(map(isnan, both)) else max(both)
                answer["opinions"], answer["no_capture"] = found, reason
                if start + length < destination.rows:
                    self._judged[destination.rid] = {**found, "start": start + length}
                    while len(self._judged) > _MOST_JUDGED:
                        self._judged.popitem(last=False)
            at += length


def _kept(segments: list, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of a batch's rows that are written: first row and end row of each.

    Ranges that touch are one, so that a batch without shared rows is copied at once.

    Args:
        segments: the requests of `_copy`, in the batch's order.
        begin: first row of the batch that is looked at.
        end: row behind the last one.
    """
    found: list[tuple[int, int]] = []
    for destination, _, at, start, length in segments:
        # shared rows that are computed again are compared
        dropped = 0 if destination.kind == protocol.COMPARING else destination.shared
        shared = max(dropped - start, 0)
        first, stop = max(at + shared, begin), min(at + length, end)
        if first >= stop:
            continue
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, stop))
    return found
