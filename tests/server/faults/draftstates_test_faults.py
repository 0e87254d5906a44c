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
    load, states, copy, put = (
        Recorder.after_load_model,
        Recorder._states,
        Recorder._copy,
        Writers.put,
    )
    seen: dict[str, torch.Tensor] = {}

    def load_and_watch(self: Recorder, result: object, runner: object, *args: object) -> None:
        load(self, result, runner, *args)
        _, stack = taps.text_model(runner.model)
        off = self._settings.spec.residual_layers[0] + 1

        def entry(module: object, positional: tuple, named: dict) -> None:
            batch = next(a for a in (*positional, *named.values()) if hasattr(a, "forward_mode"))
            seen["one layer off"] = taps._residual_stream(positional, named, batch)

        def norm(module: object, positional: tuple) -> None:
            seen["pre-norm"] = sum(positional[:2])

        stack.layers[off].register_forward_pre_hook(entry, with_kwargs=True)
        stack.norm.register_forward_pre_hook(norm)

    def faulty_states(self: Recorder, final: torch.Tensor, aux: object, read: dict) -> dict:
        found = states(self, final, aux, read)
        layers = self._settings.spec.residual_layers
        match fault():
            case "one_layer_off":
                found[layers[0]] = seen["one layer off"]
            case "pre_norm_labelled_post_norm":
                found["final"] = seen["pre-norm"]
        return found

    def faulty_copy(
        self: Recorder, segments: list, states: dict, ids: torch.Tensor, *, rows: int
    ) -> None:
        first = self._settings.spec.residual_layers[0]
        match fault():
            case "rows_of_another_request":
                states = {name: tensor.flip(0) for name, tensor in states.items()}
            case "shifted_by_one":
                states = {name: tensor.roll(1, 0) for name, tensor in states.items()}
            case "zero_row":
                states = {name: tensor.clone() for name, tensor in states.items()}
                states["final"][0] = 0
            case "nan":
                states = {name: tensor.clone() for name, tensor in states.items()}
                states[first][0, 0] = float("nan")
            case "exception":
                raise RuntimeError("planted")
            case "other_ids":
                ids = ids.roll(1)
        copy(self, segments, states, ids, rows=rows)

    def faulty_put(self: Writers, job: object) -> None:
        if fault() == "lost_chunk" and job.start == 0 and job.destination.rows > job.rows:
            job.block.release()
            return
        put(self, job)

    Recorder.after_load_model, Recorder._states, Recorder._copy, Writers.put = (
        load_and_watch,
        faulty_states,
        faulty_copy,
        faulty_put,
    )
