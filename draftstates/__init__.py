"""Conversations to verified hidden states for training speculative-decoding drafters."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`draftstates.ShardDataset`, on first use: most of the package does without torch."""
    if name == "ShardDataset":
        from draftstates.dataset import ShardDataset

        return ShardDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
