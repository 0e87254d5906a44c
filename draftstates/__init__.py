"""Conversations to verified hidden states for training speculative-decoding drafters."""


def __getattr__(name: str) -> object:
    """`ShardDataset` and `pad_batch`, on first use: most of the package does without torch."""
    if name in ("ShardDataset", "pad_batch"):
        from draftstates.shards import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
