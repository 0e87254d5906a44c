"""Removal of killed jobs' files, and of shards that no manifest lists and no plan asks for.

Of a listed shard, files in another form than the listed one are removed.
"""

import dataclasses
import shutil
from pathlib import Path

from draftstates.errors import UserError
from draftstates.extract.staging import abandoned
from draftstates.paths import Capture, Results
from draftstates.records import Manifest, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unlisted:
    """Shard that no manifest lists: its files in the order of removal, and their bytes."""

    capture_folder: str
    shard_id: str
    files: list[Path]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Folder in which a killed job was building a shard, and its bytes."""

    folder: Path
    bytes: int


def unfinished(results: Path) -> list[Unfinished]:
    """Return the building folders of killed jobs below `results`; no command reads them."""
    folders = [
        left for capture in Results(results).captures() for left in abandoned(capture.building)
    ]
    return [
        Unfinished(folder=left, bytes=sum(file.stat().st_size for file in left.iterdir()))
        for left in folders
    ]


def unlisted(results: Path) -> list[Unlisted]:
    """Return the shards below `results` that no manifest lists in this form and no plan asks for.

    The manifest is that of the shard's capture folder, the plan is the present one. A capture
    folder without a manifest is left alone, since its capture may be unfinished.

    Raises:
        UserError: the plan or a manifest cannot be read: then nothing may be removed.
    """
    plan = Plan.read(Results(results).plan)
    planned = {(plan.capture_folder, shard.shard_id) for shard in plan.shards}
    found = []
    for capture in Results(results).captures():
        # A folder without verified/ is a compact copy.
        if not capture.manifest.exists() or not capture.verified_folder.is_dir():
            continue
        listed = _listed(capture.manifest)
        for name in sorted(capture.begun_shard_ids()):
            if (capture.name, name) in planned and name not in listed:
                continue
            kept = _kept(capture, name, listed[name]) if name in listed else set()
            present = [file for file in _files(capture, name) if file.exists()]
            if present := [file for file in present if file not in kept]:
                found.append(
                    Unlisted(
                        capture_folder=capture.name,
                        shard_id=name,
                        files=present,
                        bytes=sum(file.stat().st_size for file in present),
                    )
                )
    return found


def _files(capture: Capture, shard_id: str) -> list[Path]:
    """Return a shard's files in the order of their removal.

    The files that vouch for the shard come first, so that an interruption leaves no proof without
    states.
    """
    return [
        capture.verified(shard_id),
        capture.receipts(shard_id),
        *sorted(capture.folder.glob(f"compact/*/{shard_id}.*")),
        capture.recaptures(shard_id),
        capture.shard(shard_id),
    ]


def _kept(capture: Capture, shard_id: str, listed: Path) -> set[Path]:
    """Return the files that belong to the file that a manifest lists of a shard.

    The others are its captured file where the compact form is listed, and other compact forms.
    """
    beside = {capture.verified(shard_id), capture.receipts(shard_id), listed}
    captured = listed == capture.shard(shard_id)
    return beside | {capture.recaptures(shard_id) if captured else listed.with_suffix(".json")}


def _listed(path: Path) -> dict[str, Path]:
    """Return the file of each shard that a manifest lists, by the shard's id."""
    try:
        return {shard.shard_id: path.parent / shard.path for shard in Manifest.read(path).shards}
    except UserError as error:
        raise UserError(f"{error}; no file was removed") from error


def remove(shards: list[Unlisted], left: list[Unfinished]) -> None:
    """Remove shards and building folders."""
    for shard in shards:
        for file in shard.files:
            file.unlink(missing_ok=True)
    for each in left:
        shutil.rmtree(each.folder)
