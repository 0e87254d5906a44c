"""The plan as it lies in `plan.json`, for all that reads it. It imports next to nothing: jobs that read it start by the thousand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstates.capture_spec import CaptureSpec
from draftstates.errors import UserError

FORMAT = "draftstates.plan"
FORMAT_VERSION = 1


def read_plan(path: Path) -> dict[str, Any]:
    """Read `plan.json`.

    Raises:
        UserError: not a plan of this version.
    """
    try:
        plan = json.loads(Path(path).read_bytes())
        found = (plan["format"], plan["format_version"])
        if found == (FORMAT, FORMAT_VERSION):
            _check_fields(plan)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: expected a plan, found {type(error).__name__}: {error}; run again with --forcerun plan") from error
    if found != (FORMAT, FORMAT_VERSION):
        raise UserError(f"{path}: expected {FORMAT} version {FORMAT_VERSION}, found {found[0]} {found[1]}; plan again")
    return plan


def check_run_folder(plan: Mapping[str, Any], folder: Path) -> None:
    """Hold the folder that a command writes to, `results/<run>`, to the plan.

    Raises:
        UserError: the plan is of another run, as where somebody else has planned in the same results folder meanwhile.
    """
    if folder.absolute().name != plan["run"]:
        raise UserError(f"{folder}: expected the folder of the plan's run, {plan['run']}: the plan was replaced by another one; run again")


def _check_fields(plan: dict[str, Any]) -> None:
    """Touch what every reader of a plan needs; whatever is not there raises."""
    _ = Path(plan["run"]), plan["accounting"]["sources"].items(), plan["accounting"]["totals"].items()
    _ = [shard[name] for shard in plan["shards"] for name in ("shard_id", "source", "samples", "tokens", "bytes")]
    CaptureSpec.from_fields(plan["capture"])


def check_accounting(name: str, counts: dict[str, Any]) -> None:
    """Hold a source (or the total) to promise 1.

    Raises:
        UserError: rows in are not kept + skipped + failed.
    """
    skipped, failed = sum(counts["skipped"].values()), sum(counts["failed"].values())
    if counts["rows_in"] != counts["kept"] + skipped + failed:
        raise UserError(
            f"{name}: unexplained rows: {counts['rows_in']:,} in, but {counts['kept']:,} kept + {skipped:,} skipped + {failed:,} failed"
        )
