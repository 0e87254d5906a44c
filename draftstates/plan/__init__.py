"""The plan: from the tokens of sources to shards."""
