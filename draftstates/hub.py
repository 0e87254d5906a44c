"""The hub's local cache: where it lies, and what it holds of a model or a data set.

Every job reads the configuration, so this module imports no library of the hub.
"""

import os
import re
from pathlib import Path

HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder() -> Path:
    """Return the folder of the hub's cache, as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if found := os.environ.get(name):
            return Path(found).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(base, "huggingface"))
    return Path(home).expanduser() / "hub"


def is_offline() -> bool:
    """Return whether the environment forbids the use of a network."""
    on = {"1", "on", "yes", "true"}
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in on for name in names)


def is_hub_id(text: str) -> bool:
    """Return whether a text may be an id of the hub, such as `Qwen/Qwen3-8B`."""
    return re.fullmatch(HUB_ID, text) is not None


def cached_commit(kind: str, hub_id: str, revision: str | None) -> str | None:
    """Return the commit of a revision in the cache, or None where the cache does not hold it.

    Args:
        kind: `models` or `datasets`.
        hub_id: id on the hub.
        revision: branch, tag or commit; None for the main branch.
    """
    revision = revision or "main"
    if not COMMIT.fullmatch(revision):
        try:
            revision = (_repository(kind, hub_id) / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return None
    return revision if _snapshot(kind, hub_id, revision).is_dir() else None


def cached_snapshot(kind: str, hub_id: str, revision: str | None = None) -> Path | None:
    """Return the folder of a revision in the cache, or None; arguments as `cached_commit`."""
    commit = cached_commit(kind, hub_id, revision)
    return None if commit is None else _snapshot(kind, hub_id, commit)


def _repository(kind: str, hub_id: str) -> Path:
    return cache_folder() / f"{kind}--{hub_id.replace('/', '--')}"


def _snapshot(kind: str, hub_id: str, commit: str) -> Path:
    return _repository(kind, hub_id) / "snapshots" / commit


def model_name(folder: Path) -> str:
    """Return a name for people: the folder's, or the model's in the hub's cache."""
    place = folder.absolute()
    if place.parent.name == "snapshots":
        return place.parent.parent.name.rsplit("--", 1)[-1]
    return folder.resolve().name
