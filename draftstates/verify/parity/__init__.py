"""Parity: what a server captured, against a plain Hugging Face forward pass of the checkpoint."""
