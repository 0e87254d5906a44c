"""Removal of killed jobs' files, of shards that no manifest lists and no plan asks for, and of
answers by the target model that are not those of a source's tokens.

Of a listed shard, files in another form than the listed one are removed.
"""

import dataclasses
import shutil
from pathlib import Path

from draftstates.errors import UserError
from draftstates.extract.staging import abandoned
from draftstates.paths import BUILDING, Capture, Results
from draftstates.records import Manifest, Plan, Prompts
from draftstates.tokens.files import read_accounting


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OldAnswers:
    """Answers that are not those of their source's tokens, and their bytes.

    Attributes:
        path: a chunk's file, what a killed job left of a chunk, or the folder of another key.
    """

    path: Path
    bytes: int


def old_answers(results: Path) -> list[OldAnswers]:
    """Return the answers below `results` that are not those of their source's tokens.

    A source is left alone unless all its present prompts are answered and tokenised, and so is a
    folder with answers that are newer than the tokens: a run may be on its way to use them.

    Raises:
        UserError: prompts or an accounting cannot be read: then nothing may be removed.
    """
    found = []
    for path in sorted(results.glob("answers/*/prompts.json")):
        accounting = Results(results).accounting(path.parent.name)
        if not accounting.exists() or accounting.stat().st_mtime < path.stat().st_mtime:
            continue
        said = read_accounting(accounting).get("answers") or {"folder": ""}
        present, chunks = (
            path.parent / said["folder"],
            {c.chunk_id for c in Prompts.read(path).chunks},
        )
        if not all((present / f"{name}.parquet").exists() for name in chunks):
            continue
        here = [*present.glob("*.parquet"), *(present / BUILDING).glob("*")]
        old = [each for each in sorted(here) if each.stem not in chunks]
        for folder in sorted(path.parent.iterdir()):
            times = [file.stat().st_mtime for file in _files_of(folder)] if folder.is_dir() else []
            if folder != present and times and max(times) < accounting.stat().st_mtime:
                old.append(folder)
        for each in old:
            size = sum(file.stat().st_size for file in _files_of(each))
            found.append(OldAnswers(path=each, bytes=size))
    return found


def _files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder."""
    return [file for file in (path, *path.rglob("*")) if file.is_file()]


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


def remove(shards: list[Unlisted], left: list[Unfinished], answers: list[OldAnswers]) -> None:
    """Remove shards, building folders and answers."""
    for shard in shards:
        for file in shard.files:
            file.unlink(missing_ok=True)
    for each in left:
        shutil.rmtree(each.folder)
    for old in answers:
        shutil.rmtree(old.path) if old.path.is_dir() else old.path.unlink(missing_ok=True)
