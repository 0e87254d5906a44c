"""Lengths at which a model changes what it computes: found under the keys of many families."""

import pytest

from draftstates.model.lengths import (
    SHORT,
    USUAL,
    lengths_that_matter,
    prompt_length,
    reach,
    switch_length,
)

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ({"max_position_embeddings": 8192}, {}),
        ({"sliding_window": 4096}, {"sliding_window": 4096}),
        ({"sliding_window": None}, {}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, {}),
        ({"attention_chunk_size": 8192}, {"attention_chunk_size": 8192}),
        ({"mamba_chunk_size": 256}, {"mamba_chunk_size": 256}),
        ({"chunk_size_feed_forward": 128}, {}),
        ({"index_topk": 2048}, {"index_topk": 2048}),
        ({"rope_scaling": YARN}, {"rope_scaling.original_max_position_embeddings": 4096}),
        (
            {"rope_parameters": {"full_attention": YARN}},
            {"rope_parameters.full_attention.original_max_position_embeddings": 4096},
        ),
        ({"sparse_config": {"window_size": 512, "dense_len": 8192}},
         {"sparse_config.window_size": 512, "sparse_config.dense_len": 8192}),
        ({"floor_scale": 8192, "attn_scale": 0.1}, {"floor_scale": 8192}),
        ({"seq_length": 2048, "max_position_embeddings": 8192}, {"seq_length": 2048}),
        ({"seq_length": 2048}, {}),
        ({"sparse_attention_config": {"sparse_topk_blocks": 16, "sparse_block_size": 128}},
         {"sparse_attention_config.sparse_topk_blocks": 2048,
          "sparse_attention_config.sparse_block_size": 128}),
        ({"sparse_topk_blocks": 16}, {}),
        ({"attention_window_size": [128, 64]}, {"attention_window_size": 128}),
        ({"quantization_config": {"weight_block_size": [128, 128]}}, {}),
        ({"vision_config": {"window_size": 112}}, {}),
    ],
)  # fmt: skip
def test_lengths_are_found(text: dict, found: dict) -> None:
    assert lengths_that_matter(text) == found


def test_one_prompt_goes_beyond_every_length_that_fits_and_the_others_are_named() -> None:
    text = {"sliding_window": 128, "attention_chunk_size": 8192, "mamba_chunk_size": 256}
    tokens = prompt_length(text, most=4352)
    assert tokens == 256 + SHORT
    seen = reach(text, tokens=tokens)
    assert seen.covered == {"sliding_window": 128, "mamba_chunk_size": 256}
    assert seen.beyond == {"attention_chunk_size": 8192}


def test_without_such_a_length_the_prompt_is_short() -> None:
    assert prompt_length({}, most=4352) == USUAL > 2 * SHORT
    assert prompt_length({}, most=64) == 64
    assert prompt_length({"max_position_embeddings": 40}, most=4352) == 40


LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ({}, None),
        ({"rope_scaling": YARN}, None),
        ({"rope_scaling": {**LONG, "original_max_position_embeddings": 4096}}, 4096),
        ({"rope_scaling": {**LONG, "rope_type": None, "type": "su"}}, None),
        ({"rope_scaling": {**LONG}, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_scaling": LONG}, None),
        ({"rope_parameters": {"full_attention": LONG}, "original_max_position_embeddings": 8}, 8),
    ],
)
def test_the_length_at_which_all_positions_are_rotated_otherwise(
    text: dict, switch: int | None
) -> None:
    assert switch_length({**text, "max_position_embeddings": 131072}) == switch
    assert switch_length({**text, "max_position_embeddings": 8}) is None


def test_no_prompt_of_ours_goes_beyond_that_length() -> None:
    text = {"rope_scaling": LONG, "original_max_position_embeddings": 4096}
    assert prompt_length(text, most=8192) == USUAL
    text["original_max_position_embeddings"] = 40
    assert prompt_length(text, most=8192) == 40
