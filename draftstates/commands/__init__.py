"""Commands that people run by hand, one module per command; `draftstates.cli` has their list."""
