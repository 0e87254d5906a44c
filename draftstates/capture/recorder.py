"""The two hooks: after the model is loaded, and after each forward pass's logits.

The second hook runs on the scheduler's thread while the GPU works. It queues copies on a side
stream and hands everything else to the writer threads.
"""

import importlib.metadata
import json
import sys

import torch

from draftstates.capture import plugin, siblings, taps
from draftstates.capture.admission import Admission
from draftstates.capture.blocks import BlockPool
from draftstates.capture.files import DestinationFile, Destinations
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.writer import Job, Writers
from draftstates.errors import UserError
from draftstates.extract import protocol
from draftstates.extract.protocol import Destination

_IDS_BYTES = 4
# SGLang finds the plug-in by the installed package's entry point, so the package has metadata
VERSION = importlib.metadata.version("draftstates")


class Recorder:
    """Recorder of the rows of requests whose id names a destination."""

    def __init__(self, settings: CaptureSettings, admission: Admission) -> None:
        self._settings = settings
        self._admission = admission
        self._dtype = settings.spec.torch_dtype
        self._taps: taps.Taps | None = None
        self._writers: Writers | None = None

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
        plugin.check_server(pp_size=parallel.pp_size, dp_size=dp_size, nodes=asked.nnodes)
        settings, spec = self._settings, self._settings.spec
        self._taps = taps.install(
            runner.model, layers=spec.residual_layers, final_norm=spec.final_norm
        )
        if parallel.attn_tp_rank != 0:
            return
        plugin.check_model(asked, runner.model_config, spec=spec)
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
        read = self._taps.take() if self._taps else {}
        if (
            self._writers is None
            or not getattr(batch, "rids", None)
            or not batch.forward_mode.is_extend()
        ):
            return result
        destinations = [protocol.parse_rid(rid) for rid in batch.rids]
        if not any(destinations):
            return result
        states = self._states(hidden_states, aux_hidden_states, read)
        answers = self._record(batch, destinations, states)
        self._admission.describe(destinations, answers)
        if taps.is_self_test(batch):
            self._compare(batch, destinations, states, read, answers)
        info = dict(result.customized_info or {})
        info[protocol.ANSWER_KEY] = [json.dumps(answer) for answer in answers]
        result.customized_info = info
        return result

    def _states(
        self, final: torch.Tensor, aux: object, read: dict[int, torch.Tensor]
    ) -> dict[object, torch.Tensor]:
        """Return each r_k by k, and the final state under "final", [tokens, H]."""
        inner = [k for k in self._settings.spec.residual_layers if 0 < k < self._taps.num_layers]
        if isinstance(aux, torch.Tensor):
            aux = aux.split(final.shape[-1], dim=-1)
        aux = list(aux or [])
        if len(aux) != len(inner):
            raise RuntimeError(
                f"draftstates: expected {len(inner)} residual layers from the model, found"
                f" {len(aux)}: this model file of SGLang captures in another way; use another model"
            )
        states: dict[object, torch.Tensor] = dict(zip(inner, aux, strict=True))
        for k in self._settings.spec.residual_layers:
            states.setdefault(k, read.get(k))
        states["final"] = (
            read[self._taps.num_layers] if self._settings.spec.final_norm == "pre_norm" else final
        )
        return states

    def _record(
        self, batch: object, destinations: list[Destination | None], states: dict
    ) -> list[dict]:
        """Queue the rows of every request with a destination; return one answer per request."""
        answers: list[dict] = []
        segments: list[tuple[Destination, DestinationFile, int, int, int]] = []
        at = 0
        for destination, start, length in zip(
            destinations, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False
        ):
            answer: dict = {"plugin": VERSION} if destination else {}
            if destination and (refusal := self._admission.refusal(destination)):
                answer["error"] = refusal
                destination = None
            # A decode step in a mixed batch lies past the sample's end and is not captured.
            if destination and start + length <= destination.rows:
                try:
                    segments.append(
                        (destination, self._destinations.open(destination.file), at, start, length)
                    )
                except (UserError, OSError) as error:
                    answer["error"] = str(error)
            answers.append(answer)
            at += length
        self._copy(segments, states, batch.input_ids, rows=at)
        return answers

    def _copy(self, segments: list, states: dict, ids: torch.Tensor, *, rows: int) -> None:
        """Copy rows to host blocks, block by block, and give each segment's part to the writers.

        Args:
            segments: (destination, file, first row in the batch, first row in the sample, rows) of
                each request.
            states: r_k by k, and "final".
            ids: `input_ids` of the batch.
            rows: rows of the batch.
        """
        layers = [states[k] for k in self._settings.spec.residual_layers]
        final = states["final"]
        width = final.shape[-1] * self._dtype.itemsize
        row_bytes = width * (len(layers) + 1) + _IDS_BYTES
        step = self._settings.block_bytes // row_bytes
        if step == 0:
            raise RuntimeError(
                f"draftstates: block_bytes: expected at least one row's {row_bytes} bytes, found"
                f" {self._settings.block_bytes}"
            )
        # SGLang keeps a batch's ids in a buffer that the next batch overwrites, perhaps before the
        # side stream reads it. The states are tensors of their own.
        ids = ids[:rows].to(torch.int32, copy=True)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for begin in range(0, rows if segments else 0, step):
            end = min(begin + step, rows)
            inside = [s for s in segments if s[2] < end and s[2] + s[4] > begin]
            if not inside:
                continue
            block = self._pool.take()
            block.hold(len(inside))
            count = end - begin
            hidden = block.memory[: count * width * len(layers)]
            last = block.memory[hidden.numel() : hidden.numel() + count * width]
            tail = block.memory[hidden.numel() + last.numel() :][: count * _IDS_BYTES]
            ready = self._fill((hidden, last, tail), layers, final, ids, begin, end)
            for destination, file, at, start, length in inside:
                first, stop = max(at, begin), min(at + length, end)
                a, b = first - begin, stop - begin
                self._writers.put(
                    Job(
                        destination=destination,
                        file=file,
                        start=start + first - at,
                        rows=stop - first,
                        chunk_start=first == at,
                        hidden=hidden[a * width * len(layers) : b * width * len(layers)],
                        final=last[a * width : b * width],
                        ids=tail[a * _IDS_BYTES : b * _IDS_BYTES],
                        block=block,
                        ready=ready,
                    )
                )

    def _fill(
        self,
        host: tuple,
        layers: list,
        final: torch.Tensor,
        ids: torch.Tensor,
        begin: int,
        end: int,
    ) -> torch.cuda.Event | None:
        """Fill one block's three parts with rows begin:end; on a GPU, by the side stream.

        Args:
            host: views of the block for hidden states, final states and ids.
            layers: the captured r_k, each [tokens, H].
            final: the final state, [tokens, H].
            ids: int32 [tokens].
            begin: first row of the batch in this block.
            end: the row after the last.

        Returns:
            the event that the copies end with; None on a CPU.
        """
        shape = (end - begin, len(layers), final.shape[-1])
        hidden, last = (
            host[0].view(self._dtype).view(shape),
            host[1].view(self._dtype).view(shape[0], shape[2]),
        )
        tail = host[2].view(torch.int32)
        if self._stream is None:
            for position, layer in enumerate(layers):
                hidden[:, position].copy_(layer[begin:end])
            last.copy_(final[begin:end])
            tail.copy_(ids[begin:end])
            return None
        with torch.cuda.stream(self._stream):
            hidden.copy_(
                torch.stack([layer[begin:end] for layer in layers], dim=1).to(self._dtype),
                non_blocking=True,
            )
            last.copy_(final[begin:end].to(self._dtype), non_blocking=True)
            tail.copy_(ids[begin:end], non_blocking=True)
            # The allocator must not reuse the sources before the side stream has read them.
            for source in (*layers, final, ids):
                source.record_stream(self._stream)
            ready = torch.cuda.Event(blocking=True)
            ready.record(self._stream)
        return ready

    def _compare(
        self,
        batch: object,
        destinations: list,
        states: dict,
        read: dict[int, torch.Tensor],
        answers: list[dict],
    ) -> None:
        """Add the distance of every captured r_k from the entry hook's to each self-test answer.

        It is the largest row distance, divided by the row's norm.
        """
        at = 0
        for destination, length, answer in zip(
            destinations, batch.extend_seq_lens_cpu, answers, strict=False
        ):
            if destination and destination.kind == protocol.SELF_TEST:
                difference = answer["prehook"] = {}
                for k in self._settings.spec.residual_layers:
                    seen, captured = (
                        read[k][at : at + length].float(),
                        states[k][at : at + length].float(),
                    )
                    difference[str(k)] = (
                        ((seen - captured).norm(dim=-1) / seen.norm(dim=-1)).max().item()
                    )
            at += length
