"""A finished results tree that was made without a server: everything is real but the states, the
self-test, parity and the report's page.

Tokens come from words, and the states are random ones that verification accepts. Snakemake and the
jobs are forks of a process that has loaded the libraries.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "workflow"), str(Path(__file__).parent)]

import preloaded  # noqa: E402
from captured import tiny_model  # noqa: E402
from workspace import Workspace, chat, make_workspace  # noqa: E402

from draftstates import ShardDataset  # noqa: E402
from draftstates.paths import Capture, Results  # noqa: E402

# the folders that a run writes; the others of a workspace are linked into its copies
_WRITTEN = ("results", ".snakemake")


class QuickWorkspace(Workspace):
    """A workspace whose Snakemake and scripts are forks of the process of `preloaded.preloaded`."""

    def snakemake(self, *flags: str, cores: int = 2) -> subprocess.CompletedProcess[str]:
        prepared = self.prepare(*flags, cores=cores)
        # without the interpreter, and `-m snakemake`
        arguments = prepared["args"][3:]
        status, said = preloaded.snakemake(
            arguments, folder=self.folder, environment=prepared["env"]
        )
        return subprocess.CompletedProcess(arguments, status, said)

    def copy_to(self, folder: Path, *copied: str) -> "QuickWorkspace":
        """Copy the workspace.

        Args:
            folder: the new folder.
            copied: folders to copy beside those that runs write; the others are linked.
        """
        folder.mkdir(parents=True)
        for path in self.folder.iterdir():
            if path.name in (*_WRITTEN, *copied):
                shutil.copytree(path, folder / path.name, symlinks=True)
            elif path.is_dir():
                (folder / path.name).symlink_to(path)
            else:
                shutil.copy2(path, folder)
        return QuickWorkspace(folder, self.config)

    def shell(self, command: str) -> None:
        """Run a command that a message says, in which `snakemake` is quick too."""
        environment = self.prepare()["env"]
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{environment['PATH']}"
        subprocess.run(command, shell=True, cwd=self.folder, env=environment, capture_output=True)


@dataclasses.dataclass(frozen=True)
class Finished:
    """A workspace whose run is over, and what a reader found in it.

    Attributes:
        samples: the tensors of each sample by its id.
    """

    workspace: QuickWorkspace
    samples: dict[str, dict[str, torch.Tensor]]

    @property
    def results(self) -> Results:
        return Results(self.workspace.results)

    @property
    def capture(self) -> Capture:
        return self.results.captures()[0]


def quick_workspace(folder: Path, model: Path, *, standins: bool = True) -> QuickWorkspace:
    """Make a workspace as `make_workspace` does, whose runs take a moment."""
    made = make_workspace(folder, model, standins=standins)
    if not standins:
        made.stand_in("tokenise")
        for standin in Path(__file__).with_name("standins").glob("*.py"):
            shutil.copy(standin, folder / "scripts")
    preloaded.hand_on(folder / "scripts")
    preloaded.hand_on_snakemake(folder / "bin")
    return QuickWorkspace(folder, made.config)


def make_finished(folder: Path, *, rows: int, **changes: object) -> Finished:
    """Run the workflow in a new folder, within a block of `preloaded.preloaded`.

    Args:
        folder: the folder to make.
        rows: conversations of each of the two sources.
        changes: keys of the configuration.
    """
    model = tiny_model(folder.with_name(f"{folder.name}-model"))
    (model / "tokenizer.json").write_text("{}")
    workspace = quick_workspace(folder, model, standins=False)
    workspace.config |= changes
    for source in ("one", "two"):
        workspace.write_rows([chat(f"{source}-{i}") for i in range(rows)], source)
    workspace.run()
    finished = Finished(workspace, {})
    finished.samples.update(read_all(finished.capture.manifest))
    return finished


def find_finished(folder: Path) -> Finished:
    """Return the tree that an earlier call made."""
    workspace = QuickWorkspace(folder, yaml.safe_load((folder / "config.yaml").read_text()))
    finished = Finished(workspace, {})
    finished.samples.update(read_all(finished.capture.manifest))
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
