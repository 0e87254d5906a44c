"""Tokens and loss masks from conversation datasets, with an account of every row."""
