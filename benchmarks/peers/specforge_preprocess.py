"""SpecForge's own preprocessing of a ShareGPT file, timed. Runs in SpecForge's environment."""

from specforge.data.preprocessing import build_eagle3_dataset
from timing import folder, max_tokens, report, workers
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder)
report(
    lambda rows: build_eagle3_dataset(
        rows, tokenizer, chat_template="qwen", max_length=max_tokens, num_proc=workers
    )
)
