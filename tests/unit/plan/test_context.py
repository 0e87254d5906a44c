"""The context length of the server, which no sample may reach."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstates.errors import UserError
from draftstates.model.context import context_length
from draftstates.model.folder import ModelFolder
from draftstates.plan.plan import check_lengths
from draftstates.tokens.files import SourceIndex


def model(folder: Path, **settings: Any) -> ModelFolder:
    (folder / "config.json").write_text(json.dumps(settings))
    return ModelFolder(folder)


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("settings", "args", "expected"),
    [
        ({"max_position_embeddings": 4096}, [], 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, [], 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": YARN}, [], 16384),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {**YARN, "original_max_position_embeddings": 1024},
            },
            [],
            4096,
        ),
        ({"max_position_embeddings": 4096}, ["--context-length", "512"], 512),
        ({"max_position_embeddings": 4096}, ["--context_length=512"], 512),
        ({}, [], None),
    ],
)
def test_the_servers_argument_or_the_model_names_it(tmp_path, settings, args, expected) -> None:
    assert context_length(model(tmp_path, **settings), args) == expected


def index(*lengths: int) -> SourceIndex:
    names = np.array([f"{place:032x}" for place in range(len(lengths))], dtype="S32")
    numbers = np.array(lengths)
    return SourceIndex(
        path=Path("chats.parquet"),
        source="chats",
        rows=np.arange(len(lengths)),
        names=names,
        lengths=numbers,
        supervised=numbers,
        accounting={},
    )


def test_a_sample_as_long_as_the_context_is_refused() -> None:
    check_lengths(index(5, 99), 100)
    check_lengths(index(5, 100), None)
    expected = "source chats: sample 0+1 of row 1: expected fewer tokens than .* 100, found 100.*99"
    with pytest.raises(UserError, match=expected):
        check_lengths(index(5, 100, 200), 100)
    check_lengths(index(5, 100), 100, exclude=[f"{1:032x}"])
