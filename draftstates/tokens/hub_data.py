"""Data sets of the hub: found in the local cache or fetched, and pinned to a commit.

A record names what was found: id, subset, split, and the commit that the revision stood for. The
rows are read by the record, so a branch that moves changes nothing until the record is made again.
"""

import json
import re
from pathlib import Path
from typing import Any

from draftstates.config import HubData
from draftstates.errors import UserError
from draftstates.files import publish_json
from draftstates.hub import COMMIT, cache_folder, cached_commit, cached_snapshot, is_offline

RECORD_FORMAT = "draftstates.hub_data"
_PART = re.compile(r"(?P<name>.+-)(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<rest>.*)")
_SECONDS = 10.0


def write_record(hub: HubData, path: Path) -> None:
    """Find or fetch a data set, and write its record.

    Raises:
        UserError: the cache does not hold it and it cannot be fetched, or it has no such subset or
            split.
    """
    commit = _commit_of(hub)
    rows = len(_load(hub, commit, files=_files_at(hub, commit)))
    record = {"format": RECORD_FORMAT, **hub.plain(), "revision": commit, "rows": rows}
    publish_json({**record, "asked": hub.revision}, path)


def is_record(path: Path) -> bool:
    """Return whether a file is a record."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return f'"format": "{RECORD_FORMAT}"'.encode() in file.read(200)


def read_record(path: Path) -> dict[str, Any]:
    """Return a record.

    Raises:
        UserError: the file is missing or no record.
    """
    try:
        record = json.loads(path.read_bytes())
        if record["format"] != RECORD_FORMAT:
            raise ValueError(f"its format is {record['format']!r}")
        # the KeyError of a missing field names it; what is no such data set is a ValueError
        HubData(**{name: record[name] for name in HubData.model_fields})
        if type(record["rows"]) is not int:
            raise ValueError(f"its rows are {record['rows']!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: expected the record of a data set of the hub: {type(error).__name__}:"
            f" {error}; run: snakemake --cores all --forcerun hub_data"
        ) from error
    return record


def open_record(path: Path) -> Any:
    """Return the data set that a record names, as `datasets.Dataset`.

    Raises:
        UserError: no record, or the cache does not hold what it names.
    """
    record = read_record(path)
    hub = HubData(**{name: record[name] for name in HubData.model_fields})
    dataset = _load(hub, record["revision"])
    if len(dataset) != record["rows"]:
        raise UserError(
            f"{path}: expected {record['rows']:,} rows of {hub.id} at {record['revision']}, found"
            f" {len(dataset):,}; run: snakemake --cores all --forcerun hub_data"
        )
    return dataset


def _commit_of(hub: HubData) -> str:
    if hub.revision and COMMIT.fullmatch(hub.revision):
        return hub.revision
    why = "HF_HUB_OFFLINE is set"
    if not is_offline():
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(hub.id, revision=hub.revision, timeout=_SECONDS).sha
        except Exception as error:
            # no network, no such data set, no permission: the cache may still hold it
            why = f"{type(error).__name__}: {error}"
    if found := cached_commit("datasets", hub.id, hub.revision) or _prepared_commit(hub):
        return found
    raise _not_found(hub, why)


def _prepared_commit(hub: HubData) -> str | None:
    """Return the commit of the only version that `datasets` has prepared, or None."""
    if hub.revision:
        return None
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE) / hub.id.replace("/", "___")
    found = {path.name for path in folder.glob("*/*/*") if COMMIT.fullmatch(path.name)}
    return found.pop() if len(found) == 1 else None


def _files_at(hub: HubData, commit: str) -> frozenset[str]:
    """Return the files of a data set at a commit; none where the hub cannot be asked."""
    if is_offline():
        return frozenset()
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(hub.id, revision=commit, timeout=_SECONDS).siblings or ()
    except Exception:
        # as in `_commit_of`
        return frozenset()
    return frozenset(file.rfilename for file in found)


def _load(hub: HubData, commit: str, *, files: frozenset[str] = frozenset()) -> Any:
    """Return the rows of a split at a commit.

    Args:
        files: files that the commit has, as far as they are known.
    """
    import datasets

    # a split that was loaded before is read from where `datasets` has prepared it
    datasets.disable_progress_bars()
    snapshot = cached_snapshot("datasets", hub.id, commit)
    try:
        if snapshot is not None and (is_offline() or _is_whole(snapshot, files)):
            _check_parts(snapshot)
            return datasets.load_dataset(str(snapshot), hub.subset, split=hub.split)
        loaded = datasets.load_dataset(hub.id, hub.subset, split=hub.split, revision=commit)
    except UserError:
        raise
    except Exception as error:
        # the library raises errors of any kind
        raise _not_found(hub, f"{type(error).__name__}: {error}") from None
    files = [entry["filename"] for entry in loaded.cache_files]
    if not all(commit in Path(file).parts for file in files):
        raise UserError(
            f"{hub.id}: expected the rows of commit {commit}, found those of another in"
            f" {files[0]}: fetch it with a network, or name the other revision"
        )
    return loaded


def _is_whole(snapshot: Path, files: frozenset[str]) -> bool:
    """Return whether a snapshot holds data files, and all of these files: no network is needed.

    A program that fetched single files leaves a snapshot of these alone.
    """
    has_data = any(snapshot.rglob("*.parquet")) or any(snapshot.rglob("*.jsonl"))
    return has_data and all((snapshot / name).exists() for name in files)


def _check_parts(snapshot: Path) -> None:
    """Refuse a snapshot of which parts are missing: a file named `…-of-00004` has three others."""
    files = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.exists()}
    for name in sorted(files):
        if match := _PART.fullmatch(name):
            for part in range(int(match["parts"])):
                wanted = f"{match['name']}{part:05d}-of-{match['parts']}{match['rest']}"
                if wanted not in files:
                    raise UserError(
                        f"{snapshot}: expected {wanted}, as {name} says, found none: the cache"
                        " holds a part of the data set: fetch it again with a network"
                    )


def _not_found(hub: HubData, why: str) -> UserError:
    revision = f" --revision {hub.revision}" if hub.revision else ""
    return UserError(
        f"hub: {hub.id} (subset {hub.subset or 'default'}, split {hub.split}) cannot be read from"
        f" {cache_folder()} and not be fetched ({why}); where there is a network, run: hf download"
        f" {hub.id} --repo-type dataset{revision}; or with --local-dir data/{hub.id.split('/')[-1]}"
        " and that folder as files"
    )
