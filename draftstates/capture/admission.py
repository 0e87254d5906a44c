"""Admission: which servers may capture, and which requests of ours are captured.

A server is held to the capture key before it loads the model. A request is refused with its reason,
in its answer. What goes wrong in our own code is an answer too, and never the end of a server:
requests of others are in the same batch.
"""

import functools
import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from draftstates.capture import numbers, plugin
from draftstates.capture.files import is_self_tests
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.weights import Weights, watch
from draftstates.extract import protocol
from draftstates.extract.protocol import Destination

# Position of the batch among the arguments of SGLang's `LogitsProcessor.forward`, without self.
_BATCH = 3


class Admission:
    """Admission of this rank's server and of its requests."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._runner: Any = None
        self._weights: Weights | None = None
        self._compared = ""

    def before_load_model(self, runner: Any, *args: object, **kwargs: object) -> None:
        """Refuse a server that the capture key does not describe, on the rank that writes."""
        if _writes(runner):
            spec = self._settings.spec
            self._compared = plugin.check_numbers(
                runner.server_args, runner.model_config, spec=spec
            )
            # Once more after loading, for files that are replaced meanwhile.
            plugin.check_loaded_model(runner.server_args, runner.model_config, spec=spec)

    def after_load_model(
        self, result: object, runner: Any, *args: object, **kwargs: object
    ) -> None:
        """Watch the loaded weights, on the rank that writes."""
        if _writes(runner):
            from sglang.srt.distributed import get_tp_group

            self._runner = runner
            ranks = get_tp_group().world_size
            self._weights = Weights(runner.model, root=self._settings.root, ranks=ranks)
            watch(self._weights, runner.model)

    def refusal(self, destination: Destination) -> str | None:
        """Return why a request must not be captured, or None."""
        if self._weights is None:
            return None
        self_test = is_self_tests(destination.file, root=self._settings.root)
        return self._weights.refusal(self_test=self_test)

    def describe(self, destinations: Sequence[Destination | None], answers: Sequence[dict]) -> None:
        """Add to each answer to a self-test request what its attestation needs.

        `settings` are this rank's; `weights` is the mark of weights that were updated.
        """
        asking = [
            answer
            for destination, answer in zip(destinations, answers, strict=False)
            if destination and destination.kind == protocol.SELF_TEST
        ]
        if asking and self._weights:
            settings = numbers.settings(
                self._runner, spec=self._settings.spec, compared=self._compared
            )
            for answer in asking:
                answer |= {"settings": settings, "weights": self._weights.mark}


def _writes(runner: Any) -> bool:
    from sglang.srt.runtime_context import get_parallel

    return not getattr(runner, "is_draft_worker", False) and get_parallel().attn_tp_rank == 0


def answering(hook: Callable, *, version: str) -> Callable:
    """Return a hook behind SGLang's logits that answers our requests with its own exception.

    Args:
        version: the plug-in's, for the answers.
    """

    @functools.wraps(hook)
    def call(result: Any, processor: object, *args: Any, **kwargs: Any) -> object:
        try:
            return hook(result, processor, *args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            batch = kwargs.get("logits_metadata", args[_BATCH] if len(args) > _BATCH else None)
            ours = [protocol.parse_rid(rid) for rid in getattr(batch, "rids", None) or ()]
            if any(ours):
                reason = f"the plug-in failed: {type(error).__name__}: {error}"
                failed = json.dumps({"plugin": version, "error": reason})
                result.customized_info = {
                    **(result.customized_info or {}),
                    protocol.ANSWER_KEY: [failed if each else "{}" for each in ours],
                }
            return result

    return call
