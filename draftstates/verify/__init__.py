"""Verification: the checks that a shard must pass before a manifest may list it."""
