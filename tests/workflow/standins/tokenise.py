"""Stands in for `scripts/tokenise.py`: a token is a word or a space, so that no tokenizer is
loaded, which takes longer than all else. Rows are read, counted and written as ever.
"""

import argparse
import re
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from draftstates.config import load
from draftstates.ids import sample_id
from draftstates.model.folder import ModelFolder
from draftstates.tokens import tokenise
from draftstates.tokens.accounting import RowResult
from draftstates.tokens.conversations import parse_row
from draftstates.tokens.rows import Row
from draftstates.tokens.sources import source_options
from draftstates.tokens.tokenise import Pipeline
from draftstates.tokens.turns import Sample


class Words(Pipeline):
    template = SimpleNamespace(name="words", why="")

    def process(self, row: Row) -> RowResult:
        ids, mask = [], []
        parsed = parse_row(row.value, layout=self.options.format, columns=self.options.columns)
        for message in parsed.messages:
            words = re.findall(r"\S+|\s", message["content"])
            ids += [zlib.crc32(word.encode()) % VOCABULARY for word in words]
            mask += [int(message["role"] == "assistant")] * len(words)
        sample = Sample(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))
        name = sample_id(sample.input_ids, sample.loss_mask)
        return RowResult(row.number, row.where, [(name, sample)])


parser = argparse.ArgumentParser()
for option in ("config", "tokenizer", "output", "accounting"):
    parser.add_argument(f"--{option}", type=Path, required=True)
parser.add_argument("--source", required=True)
parser.add_argument("--workers")
arguments = parser.parse_args()
VOCABULARY = ModelFolder(arguments.tokenizer).vocab_size
tokenise.Pipeline = Words
paths, options = source_options(load(arguments.config), arguments.source)
tokenise.tokenise_source(
    name=arguments.source,
    paths=paths,
    tokenizer_path=arguments.tokenizer,
    options=options,
    output=arguments.output,
    accounting=arguments.accounting,
)
