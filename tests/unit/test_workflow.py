"""What the rules ask: which shards are there, and whether sources and models have changed."""

import ast
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from captured import parity_of
from synthetic import plan_with

from draftstates import workflow
from draftstates.config import Configuration, load, resolve
from draftstates.errors import UserError, run_command
from draftstates.paths import Results

PARTS = (".safetensors", ".recaptures.safetensors", ".receipts.json")
ID, OTHER = "0" * 32, "1" * 32
REPOSITORY = Path(__file__).parents[2]
HOLDS = """
import sys
from pathlib import Path
from draftstates.workflow import hold_results

hold_results(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def make_shard(results: Path, run: str, name: str, *, without: str = "") -> None:
    folder = results / run / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part != without:
            (folder / (name + part)).touch()


def makes(results: Path, run: str, name: str) -> bool:
    """Whether the rule for shards would make this one."""
    capture = workflow.captures_without_present_shards(results)
    pattern = rf"results/(?P<capture>{capture})/shards/(?P<shard_id>[0-9a-f]{{32}})\.safetensors"
    return re.fullmatch(pattern, f"results/{run}/shards/{name}.safetensors") is not None


def test_a_present_shard_has_no_rule_and_any_other_has(tmp_path: Path) -> None:
    assert makes(tmp_path, "m-1", ID)
    make_shard(tmp_path, "m-1", ID)
    assert not makes(tmp_path, "m-1", ID)
    assert makes(tmp_path, "m-1", OTHER)
    assert makes(tmp_path, "m-2", ID)


@pytest.mark.parametrize("missing", ["compact", "stored", "verified", "receipts", "nothing"])
def test_a_stored_shard_has_no_rule_while_everything_vouches_for_it(
    tmp_path: Path, missing: str
) -> None:
    form, capture = "e4m3", Results(tmp_path).capture("m-1")
    capture.shards.mkdir(parents=True)
    paths = {
        "compact": capture.compact(ID, form),
        "stored": capture.stored(ID, form),
        "verified": capture.verified(ID),
        "receipts": capture.receipts(ID),
    }
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    paths.get(missing, tmp_path / "none").unlink(missing_ok=True)
    made = workflow.captures_without_present_shards(tmp_path, form)
    pattern = rf"(?P<capture>{made})/compact/e4m3/[0-9a-f]{{32}}\.(safetensors|json)"
    for suffix in ("safetensors", "json"):
        found = re.fullmatch(pattern, f"m-1/compact/e4m3/{ID}.{suffix}")
        assert (found is None) == (missing == "nothing")
        assert re.fullmatch(pattern, f"m-1/compact/e4m3/{OTHER}.{suffix}")


@pytest.mark.parametrize("part", PARTS)
def test_a_shard_that_lacks_a_part_is_made_again(tmp_path: Path, part: str) -> None:
    make_shard(tmp_path, "m-1", ID, without=part)
    make_shard(tmp_path, "m-1", OTHER)
    assert makes(tmp_path, "m-1", ID)
    assert not makes(tmp_path, "m-1", OTHER)


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_an_incomplete_shard_can_be_made_again(tmp_path: Path, part: str) -> None:
    """Published files have no write bits, and Snakemake refuses to make what it cannot write."""
    make_shard(tmp_path, "m-1", ID, without=part)
    make_shard(tmp_path, "m-1", OTHER)
    files = sorted((tmp_path / "m-1" / "shards").iterdir())
    for file in files:
        file.chmod(0o444)
    workflow.unlock_incomplete(tmp_path)
    writable = {file.name for file in files if file.stat().st_mode & 0o200}
    assert writable == {ID + other for other in PARTS if other != part}


def test_the_source_digest_follows_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "PACKAGE", tmp_path)
    (tmp_path / "tokens").mkdir()
    source = tmp_path / "tokens" / "a.py"
    source.write_text("one")
    before = workflow.source_digest("tokens")
    source.touch()
    assert workflow.source_digest("tokens") == before
    source.write_text("two")
    assert workflow.source_digest("tokens") != before
    with pytest.raises(FileNotFoundError):
        workflow.source_digest("gone")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "additional_chat_templates/tool_use.jinja",
        "qwen.tiktoken",
    ],
)
def test_the_tokenizer_digest_covers_all_that_decides_tokens_and_masks(
    tmp_path: Path, name: str
) -> None:
    """`eos_token_id` in the first two says what ends a turn, and so what is a target."""
    (tmp_path / "config.json").write_text("{}")
    before = workflow.present_tokenizer_digest(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"eos_token_id": 7}')
    assert workflow.present_tokenizer_digest(tmp_path) != before


def test_the_tokenizer_digest_ignores_weights(tmp_path: Path) -> None:
    assert (
        workflow.present_tokenizer_digest(tmp_path)
        == workflow.present_model_digest(tmp_path)
        == "not there"
    )
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    before = workflow.present_tokenizer_digest(tmp_path)
    (tmp_path / "model.safetensors").write_text("others")
    assert workflow.present_tokenizer_digest(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("another")
    assert workflow.present_tokenizer_digest(tmp_path) != before


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_the_data_digest_sees_a_file_replaced_by_one_of_its_size(
    tmp_path: Path, folder: bool
) -> None:
    """Also deep in a folder, whose own time stays as it is."""
    data = tmp_path / "data"
    file = data / "split" / "part.arrow" if folder else data
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("one")
    digests, times = [workflow.data_digest([str(data)])], data.stat().st_mtime_ns
    assert workflow.data_digest([str(data)]) == digests[0]
    for content, moment in (("two", 1), ("two", 2), ("longer", 2)):
        file.write_text(content)
        os.utime(file, ns=(moment, moment))
        digests.append(workflow.data_digest([str(data)]))
    if folder:
        assert data.stat().st_mtime_ns == times
        (data / "split" / "another.arrow").touch()
        digests.append(workflow.data_digest([str(data)]))
    assert len(set(digests)) == len(digests)


def test_the_data_digest_leaves_what_is_not_there_to_others(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "nowhere")
    names = [str(tmp_path / "gone.jsonl"), str(tmp_path / "folder")]
    before = workflow.data_digest(names)
    (tmp_path / "gone.jsonl").touch()
    assert workflow.data_digest(names) != before


def imported(file: Path, seen: set[Path], neutral: set[Path]) -> None:
    """Add the package's modules that `file` imports, directly or not, at its start or when it needs
    them.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftstates"):
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        for name in names:
            module = REPOSITORY / f"{name.replace('.', '/')}.py"
            if module.exists() and module not in seen | neutral:
                seen.add(module)
                imported(module, seen, neutral)


def digesting_rules() -> dict[str, list[str]]:
    """Return the folders that each rule's digest names."""
    texts = [path.read_text() for path in sorted((REPOSITORY / "rules").glob("*.smk"))]
    found = {}
    for part in (
        part
        for text in texts
        for part in re.split(r"^ *(?:rule|checkpoint) (?=\w+:$)", text, flags=re.MULTILINE)
    ):
        if digest := re.search(r"source_digest\((.*?)\)", part, flags=re.DOTALL):
            found[part.partition(":")[0]] = re.findall(r'"([^"]+)"', digest[1])
    return found


def test_every_rule_but_extraction_and_server_is_stale_by_code() -> None:
    assert set(digesting_rules()) == {
        "prompts",
        "tokenise",
        "plan",
        "verify",
        "manifest",
        "export",
        "tokens_page",
        "report_page",
        "vocabulary",
    }


@pytest.mark.parametrize("rule", sorted(digesting_rules()))
def test_a_rule_is_stale_when_any_module_that_decides_its_result_changes(rule: str) -> None:
    """What the folders import is found by text, for speed; here by Python's own parser."""
    folders = digesting_rules()[rule]
    files = {file for folder in folders for file in (workflow.PACKAGE / folder).rglob("*.py")}
    neutral = {workflow.PACKAGE / name for name in workflow.DECIDES_NOTHING}
    seen = set(files)
    for file in files:
        imported(file, seen, neutral)
    assert workflow.deciding_modules(*folders) == sorted(
        file.relative_to(workflow.PACKAGE).as_posix() for file in seen
    )


def test_a_page_is_stale_when_a_file_beside_its_modules_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "draftstates"
    shutil.copytree(workflow.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(workflow, "PACKAGE", copy)
    before, others = workflow.source_digest("report"), workflow.source_digest("plan")
    for name in ("page.css", "page.html", "page.js"):
        with open(copy / "report" / "assets" / name, "a") as file:
            file.write(" ")
        after = workflow.source_digest("report")
        assert after != before, name
        before = after
    assert workflow.source_digest("plan") == others


def test_commands_find_the_scripts_and_the_imported_package_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(REPOSITORY / "config.yaml")
    for name in ("DRAFTSTATES_SCRIPTS", "DRAFTSTATES_CONFIG", "DRAFTSTATES_MODEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/other", str(workflow.PACKAGE.parent)]))
    monkeypatch.setenv("PATH", "/bin")
    workflow.export_environment(config, code=tmp_path, in_containers=False)
    assert os.environ["DRAFTSTATES_SCRIPTS"] == str(tmp_path / "scripts")
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(workflow.PACKAGE.parent), "/other"]
    assert os.environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]


def test_rules_without_their_scripts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected the workflow's folder with scripts/"):
        workflow.code_folder(tmp_path / "https:" / "host" / "repository")
    (tmp_path / "scripts").mkdir()
    assert workflow.code_folder(tmp_path) == tmp_path


def test_a_results_folder_is_held_by_one_run_until_that_is_gone(tmp_path: Path) -> None:
    """The other has a working directory of its own; Snakemake's lock does not keep them apart."""
    results, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", HOLDS, str(results)]
    with subprocess.Popen(
        command, cwd=elsewhere, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError) as refused:
            workflow.hold_results(results)
        assert all(
            word in str(refused.value)
            for word in (str(results), f"process {other.pid} ", str(elsewhere))
        )
        workflow.hold_results(tmp_path / "others")
        other.kill()
    workflow.hold_results(results)


NOW = 1_900_000_000.0


def dated(path: Path, seconds: float) -> Path:
    """Return a file of this age; negative for one in the future."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (NOW - seconds,) * 2)
    return path


@pytest.mark.parametrize(
    "place",
    [
        *("plan.json", "tokens/one.parquet", "tokens/one.json", "tokens/shards/a.parquet"),
        *("m-1/shards/a.safetensors", "m-1/shards/a.receipts.json", "m-1/verified/a.json"),
        *("m-1/server.json", "m-1/manifest.json", "m-1/exports/specforge/export.json"),
    ],
)
def test_a_file_of_the_results_dated_in_the_future_is_named_with_the_remedy(
    tmp_path: Path, place: str
) -> None:
    path = dated(tmp_path / place, -3600)
    with pytest.raises(UserError) as refused:
        workflow.check_times([], results=tmp_path, now=NOW)
    found, now = (time.strftime("%F %T", time.localtime(at)) for at in (NOW + 3600, NOW))
    assert str(refused.value) == (
        f"{path}: expected a modification time that is not in the future, found {found}, now it is"
        f" {now}; run: touch {path}"
    )


def test_a_clock_that_differs_a_little_and_what_no_job_reads_are_no_matter(tmp_path: Path) -> None:
    dated(tmp_path / "plan.json", -50)
    dated(tmp_path / "logs" / "plan.log", -3600)
    dated(tmp_path / "m-1" / "shards" / ".building" / "a", -3600)
    workflow.check_times([tmp_path / "gone.jsonl"], results=tmp_path, now=NOW)


@pytest.mark.parametrize("count", [2, 30])
def test_the_command_for_several_files_mends_them_all(tmp_path: Path, count: int) -> None:
    data = dated(tmp_path / "my data.jsonl", -3600)
    shards = tmp_path / "results" / "m-1" / "shards"
    for number in range(count - 1):
        dated(shards / f"{number}.safetensors", -3600)
    with pytest.raises(UserError, match=rf"my data.*\({count - 1} more files too\)") as refused:
        workflow.check_times([data], results=tmp_path / "results", now=NOW)
    subprocess.run(str(refused.value).split("; run: ")[1], shell=True, check=True)
    workflow.check_times([data], results=tmp_path / "results")


def with_arguments(
    tmp_path: Path, *, args: list[str], engine: tuple[str, ...] = ()
) -> Configuration:
    raw = {
        "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8},
        "model": {"path": str(tmp_path), "name": "m", "engine_args": list(engine)},
        "capture": {},
        "server": {"args": args},
    }
    return resolve(raw, origin="config.yaml")


def test_arguments_are_shown_to_sglangs_own_parser_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before tokenising, and also in a dry run: a server would say so after 150 s."""
    wrong = with_arguments(tmp_path, args=["--mem-fraction-static", "half"])
    with pytest.raises(UserError, match="refuses --mem-fraction-static half: argument --mem-fract"):
        workflow.check_engine_arguments(wrong, cache=tmp_path)
    unknown = with_arguments(tmp_path, args=[], engine=("--flag-of-tomorrow",))
    with pytest.raises(UserError, match="unrecognized arguments: --flag-of-tomorrow"):
        workflow.check_engine_arguments(unknown, cache=tmp_path)
    right = with_arguments(tmp_path, args=["--max-total-tokens", "8"])
    workflow.check_engine_arguments(right, cache=tmp_path)
    monkeypatch.setattr(workflow.subprocess, "run", None)
    workflow.check_engine_arguments(right, cache=tmp_path)
    workflow.check_engine_arguments(with_arguments(tmp_path, args=[]), cache=tmp_path)


def parity_config(folder: Path, **checks: object) -> Configuration:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").touch()
    return resolve(
        {
            "data": {
                "sources": [{"name": "a", "files": [str(folder / "rows.jsonl")]}],
                "max_tokens": 64,
            },
            "model": {"path": str(folder / "model")},
            "capture": {"residual_layers": [1]},
            "checks": checks,
        },
        origin="test",
    )


def compares(results: Path, run: str, config: Configuration) -> bool:
    """Whether the rule for parity would make this capture's."""
    capture = workflow.captures_without_parity(results, config)
    pattern = rf"results/(?P<capture>{capture})/parity\.json"
    return re.fullmatch(pattern, f"results/{run}/parity.json") is not None


def test_parity_that_is_there_has_no_rule_unless_it_was_asked_for_otherwise(tmp_path: Path) -> None:
    config, results = parity_config(tmp_path), tmp_path / "results"
    make_shard(results, "m-1", ID)
    make_shard(results, "m-2", ID)
    assert compares(results, "m-1", config)
    known = {"asked": workflow.parity_asked(config)}
    (results / "m-1" / "parity.json").write_text(json.dumps(known))
    assert compares(results, "m-1", config), "its page is missing"
    (results / "m-1" / "parity.html").touch()
    assert not compares(results, "m-1", config)
    assert compares(results, "m-2", config)
    assert not compares(results, "m-1", parity_config(tmp_path, parity="required"))
    assert compares(results, "m-1", parity_config(tmp_path, parity_tokens=64))
    assert compares(results, "m-1", parity_config(tmp_path, parity_layers=2))
    (results / "m-1" / "parity.json").write_text("[]")
    assert compares(results, "m-1", config)


def test_another_version_of_transformers_compares_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, results = parity_config(tmp_path), tmp_path / "results"
    make_shard(results, "m-1", ID)
    (results / "m-1" / "parity.json").write_text(
        json.dumps({"asked": workflow.parity_asked(config)})
    )
    (results / "m-1" / "parity.html").touch()
    assert not compares(results, "m-1", config)
    monkeypatch.setattr(workflow.importlib.metadata, "version", lambda name: f"{name} of tomorrow")
    assert compares(results, "m-1", config)


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        ("all 8 layers", []),
        ("first 2 layers (checks.parity_layers)", ["first 2 layers (checks.parity_layers)"]),
        ("none (weights of quant_method gptq)", ["none (weights of quant_method gptq)"]),
    ],
)
def test_the_end_of_a_run_says_what_parity_did_not_compare(
    tmp_path: Path, result: str, lines: list[str]
) -> None:
    results = Results(tmp_path)
    assert workflow.parity_warnings(tmp_path) == [], "before the plan"
    plan = plan_with([], capture_folder="m-1")
    plan = dataclasses.replace(plan, capture_folder=plan.capture.folder_name)
    plan.publish(results.plan)
    assert workflow.parity_warnings(tmp_path) == [], "before the comparison"
    capture = results.capture(plan.capture.folder_name)
    capture.folder.mkdir()
    parity_of(plan.capture, result=result).publish(capture.parity)
    found = [line.split(": the other layers")[0] for line in workflow.parity_warnings(tmp_path)]
    assert found == [f"parity: {line}" for line in lines]


@pytest.mark.parametrize(
    ("gigabytes", "checks", "waits"),
    [
        (0.3, {}, True),
        (3.5, {}, True),
        (60, {}, False),
        (60, {"parity_layers": 2}, True),
    ],
)
def test_extraction_waits_for_parity_where_it_is_short(
    tmp_path: Path, gigabytes: float, checks: dict, waits: bool
) -> None:
    """The file has a hole of that size: nothing of it is read."""
    config = parity_config(tmp_path, **checks)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 40}))
    with open(model / "model.safetensors", "wb") as file:
        file.truncate(int(gigabytes * 1e9))
    assert (workflow.parity_seconds(config) < 120) == waits


def test_a_long_prompt_takes_longer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with open(model / "model.safetensors", "wb") as file:
        file.truncate(1 << 30)
    seconds = []
    for window in (128, 4096):
        config = {"num_hidden_layers": 40, "sliding_window": window}
        (model / "config.json").write_text(json.dumps(config))
        seconds.append(workflow.parity_seconds(parity_config(tmp_path)))
    assert seconds[1] > 3 * seconds[0]


@pytest.fixture
def own_term() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Scheduler:
    """What Snakemake's scheduler does about TERM and failed jobs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.restarted: list[str] = []

    def exit_gracefully(self) -> None:
        with self.lock:
            self.ending.set()

    def _handle_error(self, job: SimpleNamespace, postprocess_job: bool = True) -> None:
        if job.restart_times > job.attempt - 1:
            self.restarted.append(job.name)


def test_term_ends_a_scheduler_whose_main_thread_holds_its_lock(own_term: None) -> None:
    scheduler = Scheduler()
    workflow.heed_term(scheduler)
    with scheduler.lock:
        # in a handler that takes the lock, this thread would wait for itself
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert not scheduler.ending.is_set()
    assert scheduler.ending.wait(10)


def test_a_job_is_tried_again_unless_its_log_says_that_it_would_end_as_before(
    tmp_path: Path,
) -> None:
    scheduler = Scheduler()
    workflow.retry_what_may_pass(scheduler)

    def bad_data() -> None:
        raise UserError("data.jsonl: row 3: expected messages")

    with pytest.raises(SystemExit) as ended:
        run_command(bad_data, lasting=True)
    for name, text in {"bad": ended.value.code, "killed": "reading", "gone": None}.items():
        log = tmp_path / f"{name}.log"
        if text is not None:
            log.write_text(f"{text}\n")
        job = SimpleNamespace(name=name, log=[str(log)], attempt=1, restart_times=2)
        scheduler._handle_error(job, postprocess_job=False)
    assert scheduler.restarted == ["killed", "gone"]
