"""speculators' own preprocessing of a ShareGPT file, timed. Runs in speculators' environment.

speculators has a vLLM server render every turn. Without an address, a function replaces the server:
the same template and tokenizer in the worker's own process, without the transfer.
"""

import functools
import sys

from speculators.data_generation import preprocessing
from timing import folder, max_tokens, report, workers
from transformers import AutoTokenizer

address = sys.argv[6] if len(sys.argv) > 6 else None


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(folder)


def render_here(
    endpoint, messages, *, add_generation_prompt, tools=None, truncate_prompt_tokens=None, **_
):
    ids = tokenizer().apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt
    )["input_ids"]
    return ids[:truncate_prompt_tokens]


if address is None:
    preprocessing.render_conversation = render_here
processor = tokenizer()
report(
    lambda rows: preprocessing.build_speculator_training_dataset(
        rows,
        processor,
        max_length=max_tokens,
        num_proc=workers,
        render_endpoint=address or "in-process",
    )
)
