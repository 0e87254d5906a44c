"""The files of a source, and the options by which its rows become samples.

A source is files, patterns, folders of files or a data set of the hub.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from draftstates.config import Answers, Configuration, RemoteCode, RowOptions, SampleOptions, Source
from draftstates.config_types import PATH
from draftstates.errors import UserError
from draftstates.hub import is_hub_id
from draftstates.paths import Results

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq", ".arrow", ".feather")
COMPRESSED = (".gz", ".zst")
# files that save_to_disk writes beside the data
SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")
_WILD = re.compile(r"[*?\[]")
# how the hub's files begin with their split: train-00000-of-00002.parquet, test.jsonl
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)\b", re.IGNORECASE)


class TokeniseOptions(SampleOptions, RowOptions, RemoteCode):
    """Options by which one source becomes samples: keys of `data`, the source and `model`."""

    answers: Answers | None = None


def source_options(config: Configuration, name: str) -> tuple[list[Path], TokeniseOptions]:
    """Return the files and the options of one source.

    Raises:
        UserError: the configuration has no such source, or it has no files.
    """
    source = config.data.source(name)
    values = {**dict(config.data), **dict(source), **dict(config.model)}
    values["template_arguments"] = {**config.data.template_arguments, **source.template_arguments}
    options = TokeniseOptions(**{option: values[option] for option in TokeniseOptions.model_fields})
    return data_files(config, name), options


def data_files(config: Configuration, name: str) -> list[Path]:
    """Return the files of a source, in order.

    A pattern stands for the files that match it, and a folder for the data files in it, each by
    name. A folder that `save_to_disk` made stands for itself. The file of a data set of the hub is
    the record that the rule `hub_data` makes.

    Raises:
        UserError: no such source, a pattern or folder without data files, a folder with several
            splits, or a file with an odd name.
    """
    source = config.data.source(name)
    if source.hub is not None:
        return [Results(config.results).hub_record(name)]
    found = []
    for index, entry in enumerate(source.files):
        paths = _expanded(entry, key := _key(config, source, index))
        if odd := [path for path in paths if not re.fullmatch(PATH, str(path))]:
            raise UserError(
                f"{key}: expected names without control characters, {{ and }}, which are"
                f" Snakemake's wildcards, found {str(odd[0])!r}: rename the file"
            )
        found += paths
    return found


def read_template(path: Path) -> str:
    """Return the Jinja text of a chat template.

    Raises:
        UserError: the file is missing, not a regular file, or not UTF-8.
    """
    try:
        if not path.is_file():
            raise UserError(
                f"data.chat_template: {path}: expected a file with a Jinja template, found none"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template: {path}: expected a Jinja template in UTF-8: {error}"
        ) from error


def check_files(config: Configuration, name: str, *, made: Callable[[Path], bool]) -> None:
    """Refuse a file that does not exist and that no rule makes.

    Args:
        config: the configuration.
        name: name of the source.
        made: whether a rule makes a file.

    Raises:
        UserError: names key and absolute path, and says what to do.
    """
    source = config.data.source(name)
    for index, entry in enumerate(source.files):
        if _is_missing(entry) and not made(entry):
            raise UserError(
                f"{_key(config, source, index)}: {entry.absolute()}: no such file{_advice(entry)}"
            )


def _is_missing(entry: Path) -> bool:
    return not entry.exists() and not _WILD.search(str(entry))


def _key(config: Configuration, source: Source, index: int) -> str:
    return f"data.sources[{config.data.sources.index(source)}].files[{index}]"


def _advice(entry: Path) -> str:
    name = str(entry)
    if not is_hub_id(name) or name.endswith((*DATA_SUFFIXES, *COMPRESSED)):
        return ": correct the path, which starts at the working directory if it is relative"
    folder = f"data/{entry.name}"
    return (
        f": for the hub's data set of this name, replace files by hub: {{id: {name}, split:"
        f" train}}; or run: hf download {name} --repo-type dataset --local-dir {folder}, and name"
        f" files: [{folder}]"
    )


def _expanded(entry: Path, key: str) -> list[Path]:
    if _WILD.search(str(entry)) and not entry.exists():
        pattern = entry.relative_to(entry.anchor)
        found = sorted(Path(entry.anchor or ".").glob(str(pattern)))
        if not found:
            raise UserError(f"{key}: {entry.absolute()}: no file matches this pattern")
        return found
    if not entry.is_dir() or any((entry / name).is_file() for name in SAVED):
        return [entry]
    found = [path for path in sorted(entry.rglob("*")) if path.is_file() and _is_data(path, entry)]
    if not found:
        raise UserError(
            f"{key}: {entry.absolute()}: expected data files ({', '.join(DATA_SUFFIXES)}), or a"
            f" folder that save_to_disk made, found {_listed(entry)}"
        )
    if len(splits := _splits(found)) > 1:
        raise UserError(
            f"{key}: {entry.absolute()}: expected the files of one split, found those of"
            f" {', '.join(sorted(splits))}: name them with a pattern, such as"
            f" {found[0].parent / f'{min(splits)}*{found[0].suffix}'}"
        )
    return found


def _is_data(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    kind = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    return kind in DATA_SUFFIXES and not hidden and path.name not in SAVED


def _splits(files: Iterable[Path]) -> set[str]:
    """Return the splits that names of files or of their folders begin with."""
    found = set()
    for file in files:
        match = _SPLIT.match(file.name) or _SPLIT.match(file.parent.name)
        found.add(match[1].lower() if match else "others")
    return found


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "an empty folder"
