"""The plan as it lies on the disk: whole, and of the capture that its key names."""

import json
from pathlib import Path

import pytest
from synthetic import capture_spec, planned

from draftstates.errors import UserError
from draftstates.plan_file import FORMAT, FORMAT_VERSION, read_plan


def test_a_plan_whose_capture_was_changed_is_refused(tmp_path: Path) -> None:
    """Its key names the folder of the rows: with other layers under the same key they would be taken for what they are not."""
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "run": "m",
        "shards": [],
        "capture": planned(capture_spec(layers=(2, 4, 5))),
    }
    document |= {"accounting": {"sources": {}, "totals": {}}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    read_plan(path)
    document["capture"]["residual_layers"] = [2, 4, 6]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="a capture changed since it was planned"):
        read_plan(path)
