"""The reader of a model's answers: text, reasoning and calls in the sampled ids."""

import contextlib
from typing import Any

import numpy as np

from draftstates.tokens.rendering import LibraryRendering, renderers_for
from draftstates.tokens.template import ChatTemplate


class Parser:
    """The parser of the renderer, or of the model's family; else a general one.

    Attributes:
        reads_calls: whether it knows how the model writes a tool call.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Choose the parser.

        Args:
            template: the chat template whose model answers.
        """
        from renderers import base, configs

        tokenizer, rendering = template.tokenizer, template.rendering
        self.reads_calls = True
        if isinstance(rendering, LibraryRendering):
            self._renderer = rendering.renderer
            return
        for name in renderers_for(template.folder):
            # a renderer refuses another tokenizer than its own with errors of any kind
            with contextlib.suppress(Exception):
                self._renderer = base.create_renderer(tokenizer, configs.config_from_name(name))
                return
        # Hermes' marks, which many models write
        hermes = "<tool_call>" in tokenizer.get_vocab()
        settings = configs.DefaultRendererConfig(tool_parser="qwen3" if hermes else None)
        self._renderer = base.create_renderer(tokenizer, settings)
        self.reads_calls = hermes

    def parse(
        self, answer: list[int], *, tools: list[dict[str, Any]] | None, prompt: np.ndarray
    ) -> Any:
        """Return an answer's text, reasoning and calls, as `renderers.ParsedResponse`.

        Args:
            answer: sampled ids without the end token.
            tools: tools that were offered.
            prompt: ids of the prompt, int32 [T].
        """
        return self._renderer.parse_response(answer, tools=tools, prompt_ids=prompt.tolist())
