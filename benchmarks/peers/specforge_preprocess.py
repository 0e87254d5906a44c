"""SpecForge's own preprocessing of a ShareGPT file, timed. Runs in SpecForge's environment."""

import json
import os
import sys
import time

from datasets import load_dataset
from specforge.data.preprocessing import build_eagle3_dataset
from transformers import AutoTokenizer

file, folder, max_tokens, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tokenizer = AutoTokenizer.from_pretrained(folder)
start, before = time.perf_counter(), sum(os.times()[:4])
rows = load_dataset("json", data_files=file, split="train", cache_dir=sys.argv[5])
loaded = time.perf_counter()
samples = build_eagle3_dataset(rows, tokenizer, chat_template="qwen", max_length=max_tokens, num_proc=workers)
end = time.perf_counter()
print(
    json.dumps(
        {
            "rows": len(rows),
            "samples": len(samples),
            "seconds": end - start,
            "reading": loaded - start,
            "cpu_seconds": sum(os.times()[:4]) - before,
        }
    )
)
