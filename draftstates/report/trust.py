"""Results of the checks: margins of each shard, refused samples, and where the states come from."""

import re
from collections.abc import Iterator
from typing import Any

from draftstates.errors import UserError
from draftstates.files import read_json
from draftstates.paths import Capture, Results
from draftstates.records import Plan, Verified
from draftstates.report.norms import Norms

_REFUSED = re.compile(r"^  (the shard|sample ([0-9a-f]{32})): ([^:]+): (.*)$")
_MOST_REFUSED = 200


def trust(results: Results, plan: Plan) -> dict[str, Any]:
    """Return what the checks of a plan's shards have found.

    Returns:
        `shards`: for each verified shard `shard_id`, `source`, `samples`, `tokens`, `bytes`,
            `checksum`, `worst` (the samples nearest to a limit), and its figures;
        `missing`: number of shards that are not verified;
        `refused`: `shard_id`, `sample_id`, `check`, `detail` of each finding of a verification
            that has not passed yet;
        `attestation`: the server's `server.json`;
        `parity`: the comparison with the checkpoint, if there is one;
        `manifest`: the manifest's totals and images, if there is one;
        `exports`: trainer and summary of each export;
        `norms`: sizes of rows (see `Norms`).
    """
    capture = results.capture(plan.capture_folder)
    shards, missing, norms = [], [], Norms()
    for planned in plan.shards:
        try:
            found = Verified.read(capture.verified(planned.shard_id))
        except UserError:
            missing.append(planned.shard_id)
            continue
        norms.add(found.sizes)
        shards.append(
            {
                "shard_id": planned.shard_id,
                "source": planned.source,
                "samples": planned.samples,
                "tokens": planned.tokens,
                "bytes": found.bytes,
                "checksum": found.checksum,
                **vars(found.figures),
                "worst": [vars(each) for each in found.worst],
            }
        )
    manifest, attestation = _read(capture.manifest), _read(capture.server)
    return {
        "shards": shards,
        "missing": len(missing),
        "refused": [finding for name in missing for finding in _refused(results, capture, name)][
            :_MOST_REFUSED
        ],
        "attestation": attestation,
        "parity": manifest.get("parity") or attestation.get("parity") or {},
        "manifest": {name: manifest[name] for name in ("totals", "images") if name in manifest},
        "exports": list(_exports(capture)),
        "norms": norms.summary(),
    }


def _read(path: Any) -> dict[str, Any]:
    """Return a JSON file's object, empty where there is none."""
    try:
        return read_json(path) or {}
    except ValueError:
        return {}


def _refused(results: Results, capture: Capture, shard_id: str) -> Iterator[dict[str, Any]]:
    """Give the findings in the log of a shard's failed verification."""
    try:
        text = results.log(capture.name, "verify", shard_id).read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if found := _REFUSED.match(line):
            yield {
                "shard_id": shard_id,
                "sample_id": found[2],
                "check": found[3],
                "detail": found[4][:500],
            }


def _exports(capture: Capture) -> Iterator[dict[str, Any]]:
    """Give trainer and summary of each export."""
    for path in sorted(capture.folder.glob("exports/*/export.json")):
        yield {"trainer": path.parent.name, "path": str(path), **_read(path)}
