"""Conversations to verified hidden states for training speculative-decoding drafters."""


def __getattr__(name: str) -> object:
    """`draftstates.ShardDataset`, on first use: most of the package does without torch."""
    if name == "ShardDataset":
        from draftstates.shards.dataset import ShardDataset

        return ShardDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
