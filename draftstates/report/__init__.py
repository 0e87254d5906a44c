"""Reports for people: pages, statistics, status, and the removal of unused shards."""
