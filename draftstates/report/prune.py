"""Which shards nothing lists any more, what killed jobs left of others, and their removal."""

import dataclasses
import json
import shutil
from pathlib import Path

from draftstates import manifest
from draftstates.building import abandoned
from draftstates.errors import UserError
from draftstates.plan_file import read_plan
from draftstates.workflow import SHARD_PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unlisted:
    """A shard that is in no manifest: its files, the first to go first, and their bytes."""

    run: str
    shard_id: str
    files: list[Path]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished:
    """The folder in which a killed job was building a shard, and its bytes."""

    folder: Path
    bytes: int


def unfinished(results: Path) -> list[Unfinished]:
    """What killed jobs left below `results`, whatever the plan or a manifest says: nobody ever reads it."""
    folders = [left for shards in sorted(results.glob("*/shards")) for left in abandoned(shards)]
    return [Unfinished(folder=left, bytes=sum(file.stat().st_size for file in left.iterdir())) for left in folders]


def unlisted(results: Path) -> list[Unlisted]:
    """Shards below `results` that neither the manifest of their run lists nor the present plan asks for.

    A run without a manifest is left alone, whatever its shards: it may be unfinished.

    Raises:
        UserError: there is no plan, or a manifest or the plan cannot be read: then nothing may be removed.
    """
    plan = read_plan(results / "plan.json")
    planned = {(plan["run"], shard["shard_id"]) for shard in plan["shards"]}
    found = []
    for folder in sorted(results.glob("*/shards")):
        run = folder.parent
        if not (run / "manifest.json").exists() or not (run / "verified").is_dir():
            continue  # the latter no capture's folder, but a compact copy
        listed = _listed(run / "manifest.json")
        names = {path.name.split(".")[0] for path in folder.iterdir() if path.name.endswith(SHARD_PARTS)}
        for name in sorted(names - listed):
            if (run.name, name) not in planned:
                # what vouches for the shard goes first: an interruption leaves nothing that is believed without its states
                files = [run / "verified" / f"{name}.json", *(folder / f"{name}{part}" for part in reversed(SHARD_PARTS))]
                there = [file for file in files if file.exists()]
                found.append(Unlisted(run=run.name, shard_id=name, files=there, bytes=sum(file.stat().st_size for file in there)))
    return found


def _listed(path: Path) -> set[str]:
    try:
        content = json.loads(path.read_bytes())
        if (content["format"], content["format_version"]) != (manifest.FORMAT, manifest.FORMAT_VERSION):
            raise ValueError(f"found {content['format']} {content['format_version']}")
        return {shard["shard_id"] for shard in content["shards"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = f"{manifest.FORMAT} {manifest.FORMAT_VERSION}"
        raise UserError(f"{path}: expected {expected}, found {type(error).__name__}: {error}; nothing is removed") from error


def remove(shards: list[Unlisted], left: list[Unfinished]) -> None:
    for shard in shards:
        for file in shard.files:
            file.unlink(missing_ok=True)
    for each in left:
        shutil.rmtree(each.folder)
