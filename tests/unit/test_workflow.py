"""What the rules ask: which shards are there, and whether sources and models have changed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftstates import workflow
from draftstates.errors import UserError

ID, OTHER = "0" * 32, "1" * 32
REPOSITORY = Path(__file__).parents[2]
# They carry a result, or refuse to, but decide none.
NEUTRAL = {"cli.py", "errors.py", "config.py", "config_problems.py", "building.py", "containers.py"}
# And these decide not this rule's: layers are the plan's to choose; the others are there for a line on the screen or a single function.
OF_OTHER_RULES = {
    "tokenise": {"layers.py"},
    "plan": {"exports/possible.py", "exports/trainers.py", "final_norm.py", "forecast.py", "vocab.py"},
    "verify": {"layers.py"},
    "manifest": {"accounting.py", "layers.py"},
    "export": {"layers.py"},
    "token_statistics": {"capture_spec.py"},
    "sample_pages": set(),
    "vocabulary": {
        "capture_spec.py",
        "dataset.py",
        "exports/trainers.py",
        "final_norm.py",
        "readers.py",
        "shards.py",
        "storage.py",
    },
}
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
    for part in workflow.SHARD_PARTS:
        if part != without:
            (folder / (name + part)).touch()


def makes(results: Path, run: str, name: str) -> bool:
    """Whether the rule for shards would make this one."""
    pattern = rf"results/(?P<run>{workflow.runs_without_present_shards(results)})/shards/(?P<shard_id>[0-9a-f]{{32}})\.safetensors"
    return re.fullmatch(pattern, f"results/{run}/shards/{name}.safetensors") is not None


def test_a_present_shard_has_no_rule_and_any_other_has(tmp_path: Path) -> None:
    assert makes(tmp_path, "m-1", ID)
    make_shard(tmp_path, "m-1", ID)
    assert not makes(tmp_path, "m-1", ID)
    assert makes(tmp_path, "m-1", OTHER)
    assert makes(tmp_path, "m-2", ID)


@pytest.mark.parametrize("part", workflow.SHARD_PARTS)
def test_a_shard_that_lacks_a_part_is_made_again(tmp_path: Path, part: str) -> None:
    make_shard(tmp_path, "m-1", ID, without=part)
    make_shard(tmp_path, "m-1", OTHER)
    assert makes(tmp_path, "m-1", ID)
    assert not makes(tmp_path, "m-1", OTHER)


def test_the_source_digest_follows_content_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        workflow.source_digest("gone.py")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "additional_chat_templates/tool_use.jinja", "qwen.tiktoken"])
def test_the_tokenizer_digest_covers_all_that_decides_tokens_and_masks(tmp_path: Path, name: str) -> None:
    """`eos_token_id` in the first two says what ends a turn, and so what is a target."""
    (tmp_path / "config.json").write_text("{}")
    before = workflow.tokenizer_digest(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"eos_token_id": 7}')
    assert workflow.tokenizer_digest(tmp_path) != before


def test_the_tokenizer_digest_ignores_weights(tmp_path: Path) -> None:
    assert workflow.tokenizer_digest(tmp_path) == workflow.model_digest(tmp_path) == "not there"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    before = workflow.tokenizer_digest(tmp_path)
    (tmp_path / "model.safetensors").write_text("others")
    assert workflow.tokenizer_digest(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("another")
    assert workflow.tokenizer_digest(tmp_path) != before


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_the_data_digest_sees_a_file_replaced_by_one_of_its_size(tmp_path: Path, folder: bool) -> None:
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


def imported(file: Path, seen: set[Path]) -> set[Path]:
    """The package's modules that `file` imports, directly or not, at its start or when it needs them."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftstates"):
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        for name in names:
            module = REPOSITORY / f"{name.replace('.', '/')}.py"
            if module.exists() and module not in seen:
                seen.add(module)
                imported(module, seen)
    return seen


def modules_of(script: str) -> set[str]:
    return {path.relative_to(workflow.PACKAGE).as_posix() for path in imported(REPOSITORY / "scripts" / f"{script}.py", set())}


def digesting_rules() -> dict[str, tuple[str, set[str]]]:
    """Of each rule that is stale by code: its script, and what its digest names."""
    texts = [path.read_text() for path in sorted((REPOSITORY / "rules").glob("*.smk"))]
    found = {}
    for part in (part for text in texts for part in re.split(r"^ *(?:rule|checkpoint) (?=\w+:$)", text, flags=re.MULTILINE)):
        if digest := re.search(r"source_digest\((.*?)\)", part, flags=re.DOTALL):
            script = re.search(r"scripts/(\w+)\.py", part)[1]
            found[part.partition(":")[0]] = (script, set(re.findall(r'"([^"]+)"', digest[1])))
    return found


def test_every_rule_that_is_stale_by_code_is_looked_at() -> None:
    assert set(digesting_rules()) == set(OF_OTHER_RULES)


@pytest.mark.parametrize("rule", OF_OTHER_RULES)
def test_a_rule_is_stale_when_any_module_that_decides_its_result_changes(rule: str) -> None:
    script, digested = digesting_rules()[rule]
    modules = modules_of(script)
    covered = {name for name in modules if name in digested or name.split("/")[0] in digested}
    assert modules - covered == (modules & NEUTRAL) | OF_OTHER_RULES[rule]


@pytest.mark.parametrize("script", ["verify", "plan", "manifest"])
def test_the_imports_that_are_looked_at_are_those_that_python_makes(script: str) -> None:
    """No fewer; those that wait until they are needed are among them too."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*(name for name in sys.modules if name.startswith('draftstates.')))"
    done = subprocess.run([sys.executable, "-c", code, REPOSITORY / "scripts" / f"{script}.py"], capture_output=True, text=True, check=True)
    paths = [name.partition(".")[2].replace(".", "/") for name in done.stdout.split()]
    loaded = {f"{path}.py" for path in paths if not (workflow.PACKAGE / path).is_dir()}
    assert loaded and loaded <= modules_of(script)


def test_a_results_folder_is_held_by_one_run_until_that_is_gone(tmp_path: Path) -> None:
    """The other has a working directory of its own, so Snakemake's lock does not keep them apart."""
    results, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", HOLDS, str(results)]
    with subprocess.Popen(command, cwd=elsewhere, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError) as refused:
            workflow.hold_results(results)
        assert all(word in str(refused.value) for word in (str(results), f"process {other.pid} ", str(elsewhere)))
        workflow.hold_results(tmp_path / "others")
        other.kill()
    workflow.hold_results(results)
