"""Where rows come from: patterns, folders, the hub's cache; and what a missing file is answered."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftstates.config import HubData, resolve
from draftstates.errors import UserError
from draftstates.tokens.hub_data import is_record, open_record, read_record, write_record
from draftstates.tokens.rows import read_rows
from draftstates.tokens.sources import check_files, data_files, source_options

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def configured(**source: Any) -> Any:
    raw = {
        "data": {"sources": [{"name": "chats", **source}], "max_tokens": 64},
        "model": {"path": "models/m"},
        "capture": {},
    }
    return resolve(raw, origin="test")


def files_of(**source: Any) -> list[Path]:
    return data_files(configured(**source), "chats")


def write_parquet(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": list(texts), "completion": list(texts)}), path)


def prompts(paths: list[Path]) -> list[str]:
    return [row.value["prompt"] for row in read_rows(paths)]


# Files, patterns and folders.


def test_a_pattern_stands_for_its_files_by_name(tmp_path) -> None:
    for name in ("train-00001", "train-00000", "test-00000"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", name)
    found = files_of(files=[str(tmp_path / "data" / "train-*.parquet")])
    assert prompts(found) == ["train-00000", "train-00001"]


def test_a_relative_pattern_starts_at_the_working_directory(tmp_path, monkeypatch) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", "a")
    monkeypatch.chdir(tmp_path)
    assert files_of(files=["data/*.parquet"]) == [Path("data/a.parquet")]


@pytest.mark.parametrize("name", ["a{x}.jsonl", "b\nc.jsonl", "d\x1b[2J.jsonl"])
def test_a_file_in_a_folder_that_no_rule_can_name_is_refused(tmp_path, name: str) -> None:
    (tmp_path / "data").mkdir()
    for each in ("f *.jsonl", "g'h.jsonl", "-i.jsonl", "j..jsonl", "$(k).jsonl", "\u202el.jsonl"):
        (tmp_path / "data" / each).touch()
    assert len(files_of(files=[str(tmp_path / "data")])) == 6
    (tmp_path / "data" / name).touch()
    with pytest.raises(UserError, match=r"files\[0\]: expected names without control characters"):
        files_of(files=[str(tmp_path / "data")])


def test_a_pattern_without_files_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"files\[0\]: .*/train-\*.parquet: no file matches"):
        files_of(files=[str(tmp_path / "train-*.parquet")])


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path) -> None:
    (tmp_path / "a[1].jsonl").write_text("{}\n")
    assert files_of(files=[str(tmp_path / "a[1].jsonl")]) == [tmp_path / "a[1].jsonl"]


def test_a_folder_stands_for_the_data_files_in_it(tmp_path) -> None:
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", "second")
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", "first")
    (tmp_path / "README.md").write_text("---")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl").write_text("{}")
    assert prompts(files_of(files=[str(tmp_path)])) == ["first", "second"]


def test_a_folder_of_several_splits_is_refused_with_a_pattern(tmp_path) -> None:
    for name in ("train-00000", "test-00000"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", name)
    expected = r"expected the files of one split, found those of test, train.*data/test\*.parquet"
    with pytest.raises(UserError, match=expected):
        files_of(files=[str(tmp_path)])


def test_a_folder_without_data_is_refused(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="expected data files .* found notes.txt"):
        files_of(files=[str(tmp_path)])


def test_a_folder_of_save_to_disk_is_itself(tmp_path) -> None:
    (tmp_path / "state.json").write_text("{}")
    assert files_of(files=[str(tmp_path)]) == [tmp_path]


def missing(entry: str, *, made: bool = False) -> None:
    check_files(configured(files=[entry]), "chats", made=lambda path: made)


def test_a_missing_file_is_named_with_its_absolute_path(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^data.sources\[0\].files\[0\]: {tmp_path}/a.jsonl: no"):
        missing("a.jsonl")
    missing("a.jsonl", made=True)


def test_a_hub_id_as_file_is_answered_with_what_to_run() -> None:
    expected = (
        r"hub: {id: HuggingFaceH4/ultrachat_200k, split: train}; or run: hf download"
        r" HuggingFaceH4/ultrachat_200k --repo-type dataset --local-dir data/ultrachat_200k"
    )
    with pytest.raises(UserError, match=expected):
        missing("HuggingFaceH4/ultrachat_200k")


def test_a_source_has_files_or_a_hub_data_set() -> None:
    with pytest.raises(UserError, match="expected files or hub, found neither"):
        configured()
    with pytest.raises(UserError, match="expected files or hub, found both"):
        configured(files=["a.jsonl"], hub={"id": "a/b"})


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_text_in_another_encoding_is_refused_by_name(tmp_path, encoding, name) -> None:
    path = tmp_path / name
    path.write_bytes('{"prompt": "a", "completion": "b"}\n'.encode(encoding))
    with pytest.raises(UserError, match=f"{name}: expected text in UTF-8, found UTF-16.*iconv"):
        list(read_rows([path]))


# Arguments for the template.


def test_a_sources_arguments_go_over_those_of_data(tmp_path) -> None:
    raw = configured(files=["a.jsonl"], template_arguments={"thinking": True, "b": 1}).plain()
    raw["data"]["template_arguments"] = {"thinking": False, "a": 0}
    (tmp_path / "a.jsonl").touch()
    _, options = source_options(resolve(raw, origin="test"), "chats")
    assert options.template_arguments == {"thinking": True, "a": 0, "b": 1}


@pytest.mark.parametrize("where", ["data", "source"])
def test_arguments_that_rendering_sets_are_refused(where) -> None:
    raw = configured(files=["a.jsonl"]).plain()
    section = raw["data"] if where == "data" else raw["data"]["sources"][0]
    section["template_arguments"] = {"add_generation_prompt": True}
    with pytest.raises(UserError, match="template_arguments: expected arguments of the template"):
        resolve(raw, origin="test")


# The hub's cache.


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the hub's cache, in which one data set lies; no network may be used."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "datasets--org--chats"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    for part in range(2):
        name = f"train-{part:05d}-of-00002.parquet"
        write_parquet(snapshot / "data" / name, f"train {part}")
    write_parquet(snapshot / "data" / "test-00000-of-00001.parquet", "test")
    return tmp_path / "hub"


def test_a_data_set_is_read_from_the_cache_and_pinned(cache, tmp_path) -> None:
    write_record(HubData(id="org/chats"), tmp_path / "chats.json")
    record = read_record(tmp_path / "chats.json")
    assert (record["revision"], record["rows"], record["split"]) == (COMMIT, 2, "train")
    assert is_record(tmp_path / "chats.json")
    # a branch that moves changes nothing
    (cache / "datasets--org--chats" / "refs" / "main").write_text("f" * 40)
    assert prompts([tmp_path / "chats.json"]) == ["train 0", "train 1"]


def test_a_split_of_a_data_set(cache, tmp_path) -> None:
    write_record(HubData(id="org/chats", split="test"), tmp_path / "chats.json")
    assert prompts([tmp_path / "chats.json"]) == ["test"]


def test_a_subset_of_a_data_set(cache, tmp_path) -> None:
    snapshot = cache / "datasets--org--chats" / "snapshots" / COMMIT
    write_parquet(snapshot / "small" / "train-00000-of-00001.parquet", "small")
    subset = "{config_name: small, data_files: [{split: train, path: small/*.parquet}]}"
    (snapshot / "README.md").write_text(f"---\nconfigs: [{subset}]\n---\n")
    write_record(HubData(id="org/chats", subset="small"), tmp_path / "chats.json")
    assert prompts([tmp_path / "chats.json"]) == ["small"]


def test_a_data_set_that_datasets_has_prepared_is_read_and_pinned(cache, tmp_path) -> None:
    from datasets.packaged_modules.parquet.parquet import Parquet

    write_parquet(tmp_path / "ready.parquet", "ready")
    prepared = Parquet(
        cache_dir=str(tmp_path / "datasets"),
        dataset_name="ready",
        data_files={"train": [str(tmp_path / "ready.parquet")]},
    )
    prepared.download_and_prepare()
    # where load_dataset("org/ready") leaves a data set: there is no snapshot and no branch
    folder = tmp_path / "datasets" / "org___ready" / "default" / "0.0.0" / COMMIT
    shutil.copytree(prepared.cache_dir, folder)
    write_record(HubData(id="org/ready"), tmp_path / "record.json")
    assert read_record(tmp_path / "record.json")["revision"] == COMMIT
    assert prompts([tmp_path / "record.json"]) == ["ready"]


def test_a_missing_part_of_a_data_set_is_noticed(cache, tmp_path) -> None:
    snapshot = cache / "datasets--org--chats" / "snapshots" / COMMIT
    os.remove(snapshot / "data" / "train-00001-of-00002.parquet")
    with pytest.raises(UserError, match="expected data/train-00001-of-00002.parquet"):
        write_record(HubData(id="org/chats"), tmp_path / "chats.json")
    assert not (tmp_path / "chats.json").exists()


@pytest.mark.parametrize("more", [[], ["data/more.jsonl"]])
def test_a_part_of_a_data_set_is_not_taken_for_the_whole_where_the_hub_can_be_asked(
    cache, tmp_path, monkeypatch, more: list[str]
) -> None:
    import datasets

    def info(api, repo_id, *, revision, timeout):
        siblings = [SimpleNamespace(rfilename=name) for name in (*names, *more)]
        return SimpleNamespace(sha=COMMIT, siblings=siblings)

    def load(place, *names, **options):
        asked.append(place)
        return local(str(snapshot), *names, split=options["split"])

    asked: list[str] = []
    local = datasets.load_dataset
    snapshot = cache / "datasets--org--chats" / "snapshots" / COMMIT
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.parquet")]
    monkeypatch.setattr("draftstates.tokens.hub_data.is_offline", lambda: False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr("datasets.load_dataset", load)
    with contextlib.suppress(UserError):
        write_record(HubData(id="org/chats"), tmp_path / "chats.json")
    assert asked == ["org/chats" if more else str(snapshot)]


def test_other_rows_than_the_record_names_are_noticed(cache, tmp_path) -> None:
    path = tmp_path / "chats.json"
    write_record(HubData(id="org/chats"), path)
    path.write_text(json.dumps({**read_record(path), "rows": 3}))
    with pytest.raises(UserError, match="expected 3 rows .* found 2; run: snakemake"):
        open_record(path)


def test_a_data_set_that_is_not_in_the_cache_is_answered_with_what_to_run(cache, tmp_path) -> None:
    expected = "HF_HUB_OFFLINE is set.*run: hf download org/other --repo-type dataset"
    with pytest.raises(UserError, match=expected):
        write_record(HubData(id="org/other"), tmp_path / "other.json")


def test_an_unknown_split_is_answered(cache, tmp_path) -> None:
    with pytest.raises(UserError, match="split nothing"):
        write_record(HubData(id="org/chats", split="nothing"), tmp_path / "chats.json")


def test_a_model_may_be_named_by_its_id_where_the_cache_holds_it(cache) -> None:
    repository = cache / "models--Org--Model-1B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    raw = configured(files=["a.jsonl"]).plain()
    raw["model"] = {"path": "Org/Model-1B"}
    model = resolve(raw, origin="test").model
    assert (model.path, model.name) == (snapshot, "Model-1B")
