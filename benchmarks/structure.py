"""Samples that share prefixes as those of real conversations do, of random ids."""

import numpy as np


def random_samples(
    structure: list[list[tuple[int, int, int]]], *, vocabulary: int, seed: int
) -> list[np.ndarray]:
    """Return samples of random ids that share prefixes as the structure says.

    Args:
        structure: of each conversation, tokens, parent and shared tokens of each sample.
        vocabulary: ids are below this number.
        seed: of the random numbers.
    """
    random, found = np.random.default_rng(seed), []
    for conversation in structure:
        samples: list[np.ndarray] = []
        for length, parent, shared in conversation:
            head = samples[parent][:shared] if parent >= 0 else np.empty(0, np.int32)
            own = random.integers(3, vocabulary, length - len(head)).astype(np.int32)
            samples.append(np.concatenate([head, own]))
        found += samples
    return found
