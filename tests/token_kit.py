"""Parts that tests of tokenising share: real tokenizers, and samples made readable."""

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from draftstates.commands import cli
from draftstates.tokens import encoder as tokenizer_module
from draftstates.tokens import template as template_module
from draftstates.tokens.conversations import Conversation
from draftstates.tokens.encoder import load_tokenizer
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.tokenise import tokenise_source
from draftstates.tokens.turns import Sample, tokenise_conversation

REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2 = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
# real templates, and a tokenizer with the marks of them all; see `fetch_tokenizers.py`
REAL_TEMPLATES = sorted((REPOSITORY / ".cache" / "templates").glob("*.jinja"))
ALL_MARKS = REPOSITORY / ".cache" / "tokenizers" / "marked"
# end tokens that the models' own files name, by the beginning of the template's name
END_TOKENS = {
    "Apertus": ("<|assistant_end|>",),
    "Apriel-1": ("<|end|>",),
    "ByteDance-Seed": ("<seed:eos>",),
    "Cohere": ("<|END_OF_TURN_TOKEN|>",),
    "GLM-4": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "Kimi-K3": ("<|end_of_msg|>",),
    "google-gemma-4": ("<turn|>", "<|tool_response>"),
    "microsoft-Phi": ("<|end|>",),
    "openai-gpt-oss": ("<|return|>", "<|call|>"),
    "tencent-Hy3": ("<｜hy_eos:opensource｜>",),
    "unsloth-Apriel": ("<|end|>",),
    "upstage-Solar": ("<|end|>", "<|calls|>"),
}
_NEEDS_TOOLS = "'NoneType' object is not iterable.*data.template_arguments.*data.chat_template"
# templates that are refused, and what the message says
REFUSED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": _NEEDS_TOOLS,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": _NEEDS_TOOLS,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": _NEEDS_TOOLS,
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined.*data.template_arguments",
    "llama-cpp-rwkv-world": "puts nothing after an assistant turn.*data.chat_template",
}

# The import takes longer than the rest of a test.
_loaded_once = functools.cache(load_tokenizer)
tokenizer_module.load_tokenizer = template_module.load_tokenizer = _loaded_once


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer of `fetch_tokenizers.py`, or of the demo's model."""
    folder = SMOLLM2 if name == "smollm2" else REPOSITORY / ".cache" / "tokenizers" / name
    assert (folder / "tokenizer.json").exists(), (
        f"{folder}: run `make test`, or tests/fetch_tokenizers.py first"
    )
    return folder


@functools.cache
def template(
    name: str, file: str | None = None, *, end_tokens: tuple[str, ...] = (), **arguments: Any
) -> ChatTemplate:
    """Return a chat template with its tokenizer, loaded once."""
    path = TEMPLATES / file if file else None
    return ChatTemplate(
        tokenizer_folder(name), chat_template=path, arguments=arguments, end_tokens=end_tokens
    )


@functools.cache
def real_template(name: str) -> ChatTemplate:
    """Return one of `REAL_TEMPLATES` by its name, loaded once."""
    ends = next((ends for start, ends in END_TOKENS.items() if name.startswith(start)), ())
    file = REAL_TEMPLATES[0].parent / f"{name}.jinja"
    return ChatTemplate(ALL_MARKS, chat_template=file, end_tokens=ends)


def chat(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return messages of a user and an assistant in turn."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(turns)
    ]


def tokenise(
    loaded: ChatTemplate,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[Sample]:
    """Return the samples of one conversation; fail if some of its turns are left out."""
    samples, lost = tokenise_conversation(
        Conversation(messages, tools), loaded, TokeniseOptions(**{"max_tokens": 4096, **options})
    )
    assert not lost
    return samples


def server_ids(
    loaded: ChatTemplate, messages: list[dict[str, Any]], *, prompt: bool = False, **arguments: Any
) -> list[int]:
    """Return the ids by transformers' own `apply_chat_template`."""
    chosen = {"chat_template": loaded.chat_template, "add_generation_prompt": prompt, **arguments}
    return loaded.tokenizer.apply_chat_template(messages, **chosen)["input_ids"]


def targets(loaded: ChatTemplate, sample: Sample) -> list[str]:
    """Return the text of each sequence of supervised tokens."""
    runs: list[list[int]] = []
    for index, (token, target) in enumerate(
        zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    ):
        if target:
            if index == 0 or not sample.loss_mask[index - 1]:
                runs.append([])
            runs[-1].append(token)
    return [loaded.tokenizer.decode(run) for run in runs]


def marked(loaded: ChatTemplate, sample: Sample) -> str:
    """Return the sample's text with its supervised tokens in ⟦ ⟧."""
    text, inside = "", 0
    for token, target in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        text += ("⟦" if target else "⟧") if target != inside else ""
        text += loaded.tokenizer.decode([token])
        inside = target
    return text + ("⟧" if inside else "")


def run_source(
    folder: Path, rows: list[Any], *, workers: int = 1, tokenizer: str = "smollm2", **options: Any
) -> dict[str, Any]:
    """Tokenise rows as one JSONL source named `test` in `folder`, and return the accounting.

    A row is an object, or the text of a line as it stands in the file.
    """
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    source = folder / "rows.jsonl"
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return tokenise_source(
        name="test",
        paths=[source],
        tokenizer_path=tokenizer_folder(tokenizer),
        options=TokeniseOptions(**{"max_tokens": 2048, "max_skipped_fraction": 1.0, **options}),
        output=folder / "test.parquet",
        accounting=folder / "test.json",
        workers=workers,
    )


def run_cli(*arguments: object) -> None:
    """Run one command of `draftstates` in this process."""
    cli.main([*map(str, arguments)])


def run_script(name: str, *arguments: object) -> None:
    """Run one of `scripts/` in this process; a process of its own would take seconds to start."""
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(REPOSITORY / "scripts" / name), run_name="__main__")
    finally:
        sys.argv = before
