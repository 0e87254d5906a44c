"""A finished results tree that was made without a server: everything is real but the states.

Tokens come from words, and the states are random ones that verification accepts.
"""

import dataclasses
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "workflow")]

from captured import tiny_model  # noqa: E402
from workspace import (  # noqa: E402
    REPOSITORY,
    STANDINS,
    Workspace,
    chat,
    make_workspace,
    tiny_config,
)

from draftstates import ShardDataset  # noqa: E402
from draftstates.paths import Results  # noqa: E402

_WORDS_FOR_TOKENS = ("tokenise", "report_page", "server")
_EXTRACT = """
import runpy, sys
sys.path.insert(0, {tests!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A workspace whose run is over, and what a reader found in it.

    Attributes:
        samples: the tensors of each sample by its id.
    """

    workspace: Workspace
    samples: dict[str, dict[str, torch.Tensor]]

    @property
    def results(self) -> Results:
        return Results(self.workspace.results)

    @property
    def manifest(self) -> Path:
        return self.results.captures()[0].manifest


def make_finished(folder: Path, *, rows: int, **changes: object) -> Finished:
    """Run the workflow in a new folder.

    Args:
        folder: the folder to make.
        rows: conversations of each of the two sources.
        changes: keys of the configuration.
    """
    model = tiny_model(folder.with_name(f"{folder.name}-model"))
    (model / "tokenizer.json").write_text("{}")
    workspace = make_workspace(folder, model, standins=False)
    for name in _WORDS_FOR_TOKENS:
        (folder / f"scripts/{name}.py").write_bytes((STANDINS / f"{name}.py").read_bytes())
    script = Path(__file__).with_name("standins") / "extract.py"
    text = _EXTRACT.format(tests=str(TESTS), script=str(script))
    (folder / "scripts/extract.py").write_text(text)
    for source in ("one", "two"):
        workspace.write_rows([chat(f"{source}-{i}") for i in range(rows)], source)
    workspace.config = {**tiny_config(), **changes}
    workspace.run()
    finished = Finished(workspace, {})
    finished.samples.update(read_all(finished.manifest))
    return finished


def read_all(manifest: Path, *, verify: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of every sample by its id, as a trainer reads them."""
    dataset = ShardDataset(manifest, verify=verify)
    return {dataset.sample_id(i): dataset[i] for i in range(len(dataset))}


def equal(
    first: dict[str, dict[str, torch.Tensor]], second: dict[str, dict[str, torch.Tensor]]
) -> bool:
    """Return whether two readings have the same samples with the same bits."""
    return first.keys() == second.keys() and all(
        first[name].keys() == second[name].keys()
        and all(torch.equal(value, second[name][key]) for key, value in first[name].items())
        for name in first
    )


__all__ = ["REPOSITORY", "Finished", "equal", "make_finished", "read_all"]
