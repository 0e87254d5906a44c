"""Copy of the workflow in a folder of its own, with small data and a tiny model.

Snakemake runs in this folder.
"""

import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from workflow_copy import copy_workflow

STANDINS = Path(__file__).parent / "standins"
WORDS = (
    "the",
    "a",
    "river",
    "stone",
    "light",
    "under",
    "house",
    "seven",
    "small",
    "green",
    "walk",
    "paper",
    "night",
    "opens",
    "until",
)


@dataclasses.dataclass
class Workspace:
    """Working folder with everything that a run needs; `config` is written before each run."""

    folder: Path
    config: dict[str, Any]

    @property
    def results(self) -> Path:
        return self.folder / self.config.get("results", "results")

    def prepare(self, *flags: str, cores: int = 2) -> dict[str, Any]:
        """Write the configuration; return arguments, folder and environment for Snakemake."""
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        # The folder has a copy of the package, which a test may edit.
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        environment.pop("DRAFTSTATES_RUN_FOLDER", None)
        command = [sys.executable, "-m", "snakemake", "--cores", str(cores), *flags]
        return {"args": command, "cwd": self.folder, "env": environment}

    def snakemake(self, *flags: str, cores: int = 2) -> subprocess.CompletedProcess[str]:
        """Run Snakemake to its end; its output is in `stdout`."""
        return subprocess.run(
            **self.prepare(*flags, cores=cores),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *flags: str, cores: int = 2) -> "Run":
        """Run Snakemake, which must succeed."""
        done = self.snakemake(*flags, cores=cores)
        assert done.returncode == 0, done.stdout
        return Run(done.stdout)

    def plan(self) -> dict[str, Any]:
        return json.loads((self.results / "plan.json").read_text())

    def shards(self) -> list[Path]:
        """Return the present shards of the planned run."""
        folder = self.results / self.plan()["capture_folder"] / "shards"
        return sorted(
            path for path in folder.glob("*.safetensors") if ".recaptures" not in path.name
        )

    def rows(self, source: str = "one") -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / f"{source}.jsonl").read_text().splitlines()
        ]

    def write_rows(self, rows: list[dict[str, Any]], source: str = "one") -> None:
        (self.folder / f"{source}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )

    def stand_in(self, *scripts: str) -> None:
        """Replace scripts by their stand-ins."""
        for name in scripts:
            shutil.copy(STANDINS / f"{name}.py", self.folder / "scripts" / f"{name}.py")

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must occur, in a file of the copied workflow."""
        file = self.folder / path
        text = file.read_text()
        assert old in text, f"{path} has no {old!r}"
        file.write_text(text.replace(old, new))


@dataclasses.dataclass
class Run:
    """Output of a run of Snakemake."""

    output: str

    def jobs(self, rule: str) -> int:
        """Return the number of started jobs of a rule."""
        return len(
            re.findall(rf"^(?:local)?(?:rule|checkpoint) {rule}:$", self.output, flags=re.MULTILINE)
        )

    @property
    def extracted(self) -> int:
        return self.jobs("extract")

    @property
    def nothing_to_be_done(self) -> bool:
        return "Nothing to be done" in self.output


def make_workspace(folder: Path, model: Path, *, standins: bool) -> Workspace:
    """Copy the workflow and the model to `folder`, with two sources of random chats, some 8 shards.

    Args:
        standins: replace the commands that take long by those of `standins/`, so that the graph
            alone is tested.
    """
    folder.mkdir(parents=True)
    copy_workflow(folder)
    shutil.copytree(model, folder / "models" / "tiny")
    workspace = Workspace(folder, tiny_config())
    if standins:
        workspace.stand_in(*(path.stem for path in STANDINS.glob("*.py")))
    workspace.write_rows([chat(f"one-{i}") for i in range(36)], "one")
    workspace.write_rows([chat(f"two-{i}") for i in range(12)], "two")
    return workspace


def tiny_config() -> dict[str, Any]:
    return {
        "data": {
            "sources": [
                {"name": "one", "files": ["one.jsonl"]},
                {"name": "two", "files": ["two.jsonl"]},
            ],
            "max_tokens": 512,
        },
        "model": {"path": "models/tiny"},
        "capture": {
            "residual_layers": [1, 2, 3],
            "stored_dtype": "float32",
            "compute_dtype": "float32",
        },
        "shards": {"min_bytes": "256KiB", "max_bytes": "1MiB"},
    }


def chat(seed: str) -> dict[str, Any]:
    """Return a conversation of random words, the same for the same seed."""
    draw = random.Random(seed)
    turns = [
        {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(10, 40)))}
        for role in ("user", "assistant") * 2
    ]
    return {"messages": turns}


def make_tiny_model(folder: Path, tokenizer: Path, *, seed: int = 0) -> None:
    """Make a random Llama of 4 layers and hidden size 32 that has the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=49152, bos_token_id=1, eos_token_id=2, **shape)
    ).save_pretrained(folder)
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)
