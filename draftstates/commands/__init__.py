"""Commands that people run by hand, one module per command; `cli` has their list."""
