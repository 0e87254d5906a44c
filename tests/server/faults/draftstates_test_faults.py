"""A second plug-in, which plants faults for tests.

DRAFTSTATES_TEST_FAULT names a file whose present text is the fault of the capture.
DRAFTSTATES_TEST_TEXT_ONLY makes SGLang serve a multimodal model without its image processor, whose
files a tiny model does not have.
"""

import os
from pathlib import Path

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from draftstates.capture import taps
from draftstates.capture.recorder import Recorder
from draftstates.capture.writer import Writers


def fault() -> str:
    path = Path(os.environ.get("DRAFTSTATES_TEST_FAULT", "/nonexistent"))
    return path.read_text() if path.exists() else "none"


def register() -> None:
    if "DRAFTSTATES_TEST_TEXT_ONLY" in os.environ:
        HookRegistry.register(
            "sglang.srt.configs.model_config.ModelConfig.__init__", serve_text_only, HookType.AFTER
        )
    if "DRAFTSTATES_TEST_FAULT" in os.environ:
        plant()


def serve_text_only(result: object, config: object, *args: object, **kwargs: object) -> None:
    config.is_multimodal = False


def plant() -> None:
    copy, put = Recorder._copy, Writers.put
    enter, enter_norm = taps.Taps._enter, taps.Taps._enter_norm

    def other_layer(self: taps.Taps, k: int, *rest: object) -> None:
        """Exchange the states of a captured layer and of the layer after it."""
        first = self._layers[1]
        if fault() == "one_layer_off" and k in (first, first + 1):
            k = {first: first + 1, first + 1: first}[k]
        enter(self, k, *rest)

    def stale_residual(self: taps.Taps, call: object, adds: bool, *rest: object) -> None:
        """Take for r_N what the norm is given beside the residual that it adds."""
        enter_norm(self, call, adds and fault() != "residual_left_out", *rest)

    def faulty_copy(
        self: Recorder,
        segments: list,
        hidden: torch.Tensor,
        final: torch.Tensor,
        ids: torch.Tensor,
        *,
        rows: int,
    ) -> None:
        match fault():
            case "pre_norm_labelled_post_norm":
                # r_N is the last of the captured layers.
                final = hidden[:, -1].contiguous()
            case "rows_of_another_request":
                hidden, final = hidden.flip(0), final.flip(0)
            case "shifted_by_one":
                hidden, final = hidden.roll(1, 0), final.roll(1, 0)
            case "zero_row":
                final[0] = 0
            case "nan":
                hidden = hidden.clone()
                hidden[0, 0, 0] = float("nan")
            case "exception":
                raise RuntimeError("planted")
            case "other_ids":
                ids = ids.roll(1)
            case "embedding_scaled_twice":
                hidden = hidden.clone()
                hidden[:, 0] *= 2
            case "other_the_second_time" if "/second/" in segments[0][0].file:
                hidden = hidden.clone()
                hidden[:, 1] *= 1.1
        copy(self, segments, hidden, final, ids, rows=rows)

    def faulty_put(self: Writers, job: object) -> None:
        if fault() == "lost_chunk" and job.start == 0 and job.destination.rows > job.rows:
            job.block.release()
            return
        put(self, job)

    Recorder._copy, Writers.put = faulty_copy, faulty_put
    taps.Taps._enter, taps.Taps._enter_norm = other_layer, stale_residual
