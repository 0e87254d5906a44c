"""The rule `export`: it runs when the manifest changed and reuses its earlier files.

When it fails, it leaves nothing that counts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import capture_spec, norm_model, sample, write_manifest

from draftstates.model.digest import model_digest
from draftstates.model.folder import ModelFolder
from draftstates.shards.layout import read_header

ROOT = Path(__file__).parents[2]
SNAKEFILE = """
from pathlib import Path
from draftstates import workflow as ask
from draftstates.paths import Results

RESULTS = Results(Path("results"))
CAPTURE = RESULTS.capture("{{capture}}")
MODEL = Path("model")


def export_arguments(wildcards):
    return "--draft-vocab-size 20"


rule all:
    input:
        "results/run/exports/specforge/export.json",


include: "{root}/rules/export.smk"
"""


class Run:
    """Folder with a manifest and the rule."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = capture_spec(
            model_digest=model_digest(ModelFolder(norm_model(folder / "model")))
        )
        self.output = folder / "results" / "run" / "exports" / "specforge"
        (folder / "Snakefile").write_text(SNAKEFILE.format(root=ROOT))

    def manifest(self, count: int, *, missing: int | None = None) -> None:
        samples = [sample(6 + i, spec=self.spec, seed=i) for i in range(count) if i != missing]
        write_manifest(self.folder / "results" / "run", [samples], spec=self.spec)

    def snakemake(self) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "DRAFTSTATES_MODEL": "model",
            "DRAFTSTATES_SCRIPTS": str(ROOT / "scripts"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "progress"]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )

    def said(self) -> str:
        return (self.folder / "results" / "logs" / "run" / "export" / "specforge.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_an_export_follows_its_manifest_and_writes_only_what_is_new(run: Run) -> None:
    run.manifest(8, missing=3)
    assert run.snakemake().returncode == 0
    assert "7 files written and read back, 0 as they were" in run.said()
    assert json.loads((run.output / "export.json").read_text())["layers"] == {
        "r_2": 1,
        "r_3": 2,
        "r_5": 4,
    }
    assert (run.output / "vocab_mapping.pt").exists()

    again = run.snakemake()
    assert again.returncode == 0 and "Nothing to be done" in again.stdout + again.stderr

    run.manifest(8)
    assert run.snakemake().returncode == 0
    assert "1 files written and read back, 7 as they were" in run.said()


def test_a_failed_export_leaves_no_summary_and_keeps_what_was_exported(run: Run) -> None:
    run.manifest(4)
    assert run.snakemake().returncode == 0
    run.manifest(5)
    folder = run.folder / "results" / "run"
    shard = folder / json.loads((folder / "manifest.json").read_text())["shards"][0]["path"]
    whole = shard.read_bytes()
    # The fault is in the new sample's last row; the other samples are not read.
    at = read_header(shard).tensors["final_hidden_state"][3] - 1
    shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert run.snakemake().returncode != 0
    assert run.said().startswith("error: ") and "does not have the checksum" in run.said()
    assert not (run.output / "export.json").exists()
    shard.write_bytes(whole)
    assert run.snakemake().returncode == 0
    assert "1 files written and read back, 4 as they were" in run.said()
