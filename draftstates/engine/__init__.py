"""The engine's flags and environment variables: which change numbers, and which are refused."""
