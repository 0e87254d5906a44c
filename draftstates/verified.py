"""What verification found of a shard, as `verified/<shard id>.json` holds it. Without torch: extracting jobs read it too."""

import json
from typing import Any

import xxhash

FORMAT = "draftstates.verified"
FORMAT_VERSION = 1


def sealed(found: dict[str, Any]) -> dict[str, Any]:
    """What was found, with a digest of it all, so that a later change of the file is noticed."""
    content = {name: value for name, value in found.items() if name != "digest"}
    return {**content, "digest": xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())}
