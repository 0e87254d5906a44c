"""Conversations to verified hidden states for training speculative-decoding drafters."""

__version__ = "0.1.0"
