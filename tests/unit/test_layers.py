"""The package's layers: imports follow the data's direction, and two libraries stay outside."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "draftstates"
# modules at the package's top that import no stage
FOUNDATION = {
    "config",
    "config_problems",
    "config_types",
    "containers",
    "documents",
    "engine",
    "errors",
    "files",
    "hub",
    "ids",
    "paths",
    "records",
    "spec",
}
# low to high: a layer may import itself and the layers before it
LAYERS = (
    FOUNDATION,
    {"model"},
    {"tokens"},
    {"plan"},
    {"shards"},
    {"extract"},
    {"answers"},
    {"capture"},
    {"server"},
    {"verify"},
    {"exports"},
    {"report"},
    # what brings the stages together
    {"workflow", "commands"},
    # the package's own __init__.py, which names what users import
    {""},
)
MOST_MODULES_AT_THE_TOP = 14


def module_files() -> dict[str, Path]:
    """Return the file of each module of the package, by its dotted name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = module_files()


def imported(source: str) -> set[str]:
    """Return the modules that a source imports, at its top or inside a function.

    `from a import b` counts as `a.b` where `a.b` is a module of the package.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: expected an absolute import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found


def layer(module: str) -> int:
    """Return the number of a module's layer."""
    name = [*module.split("."), ""][1]
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert found, f"{module}: expected a layer in LAYERS for {name}"
    return found[0]


def back_edges(module: str, source: str) -> list[str]:
    """Return the imports of a module that lead to a higher layer."""
    return [
        f"{module} imports {other}"
        for other in sorted(imported(source))
        if other.partition(".")[0] == PACKAGE.name and layer(other) > layer(module)
    ]


def imports_within(layer_number: int) -> dict[str, set[str]]:
    """Return what each module of a layer imports of the same layer."""
    names = {name for name in MODULES if layer(name) == layer_number}
    return {name: imported(MODULES[name].read_text()) & names - {name} for name in names}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_no_higher_layer(module: str) -> None:
    assert back_edges(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("draftstates.tokens.rows", "from draftstates.plan import plan"),
        ("draftstates.errors", "from draftstates.model.folder import ModelFolder"),
        ("draftstates.report.status", "import draftstates.workflow"),
        ("draftstates.plan.plan", "def f():\n    from draftstates import ShardDataset"),
    ],
)
def test_a_back_edge_is_found(module: str, source: str) -> None:
    assert len(back_edges(module, source)) == 1


def test_the_foundation_has_no_cycle() -> None:
    pending = imports_within(0)
    while free := {name for name, others in pending.items() if not others & set(pending)}:
        pending = {name: others for name, others in pending.items() if name not in free}
    assert not pending, f"expected no cycle, found one among {sorted(pending)}"


def test_the_packages_top_stays_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES_AT_THE_TOP


@pytest.mark.parametrize(("library", "owner"), [("snakemake", None), ("sglang", "capture")])
def test_a_library_is_imported_where_it_belongs(library: str, owner: str | None) -> None:
    users = {
        [*name.split("."), ""][1]
        for name, file in MODULES.items()
        if any(other.partition(".")[0] == library for other in imported(file.read_text()))
    }
    assert users == ({owner} if owner else set())


def test_no_two_files_of_one_run_of_the_tests_have_the_same_name() -> None:
    """Pytest skips the second of two modules of one name, with an error at the end."""
    names = Counter(
        path.name
        for path in (PACKAGE.parent / "tests").rglob("test_*.py")
        if path.parent.name != "exports" or "unit" in path.parts
    )
    assert [name for name, count in names.items() if count > 1] == []
