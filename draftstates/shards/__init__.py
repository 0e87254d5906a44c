"""The shard format: layout, readers, manifest, dataset, compact form."""
