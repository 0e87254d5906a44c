"""One prompt of the self-test is longer than a chunk and than 2,048 rows, where there is room."""

import pytest

from draftstates.verify.selftest import fitting, prompt_lengths

SHORT = (10, 64, 300)


@pytest.mark.parametrize(
    ("info", "text", "longest"),
    [
        ({"chunked_prefill_size": 8192, "device": "cuda"}, {}, 8292),
        ({"chunked_prefill_size": 512, "device": "cuda"}, {}, 2148),
        ({"chunked_prefill_size": -1, "device": "cuda"}, {}, 2148),
        ({"chunked_prefill_size": 8192, "device": "cuda", "context_length": 4096}, {}, 4095),
        ({"chunked_prefill_size": 8192}, {"max_position_embeddings": 2048}, 2047),
        ({"chunked_prefill_size": 512, "device": "cpu"}, {}, 612),
    ],
)
def test_the_longest_prompt_crosses_what_changes_with_length(
    info: dict, text: dict, longest: int
) -> None:
    assert prompt_lengths(info, text) == (*SHORT, longest)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"chunked_prefill_size": 8192, "device": "cpu"}, {}),
        ({"chunked_prefill_size": 8192}, {"max_position_embeddings": 256}),
    ],
)
def test_without_room_or_on_a_slow_cpu_the_prompts_are_short(info: dict, text: dict) -> None:
    assert prompt_lengths(info, text) == SHORT


def test_the_prompt_of_parity_is_one_that_the_server_takes() -> None:
    """The context of some families is shorter than their position embeddings."""
    info = {"context_length": 2048, "max_total_num_tokens": 16384}
    assert fitting(2112, info, {"max_position_embeddings": 8192}) == 2047
    assert fitting(2112, {}, {"max_position_embeddings": 40}) == 39
    assert fitting(2112, {"context_length": None}, {}) == 2112
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    assert fitting(2112, {}, {"rope_scaling": longrope}) == 512
