"""The client: it sends one shard's samples through the server into one file."""
