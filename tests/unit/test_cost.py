"""What runs by the thousand stays cheap: processes start without torch, and a shard's ids are read
once and not once a sample.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from captured import capture, tiny_model, write

from draftstates.shards.layout import Shard
from draftstates.verify.verify import verify_shard

REPOSITORY = Path(__file__).parents[2]
WITHOUT_TORCH = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 0
sys.exit(TORCH if "torch" in sys.modules else 0)
"""
# a status that no failure has
TORCH = 17


@pytest.mark.parametrize(
    ("script", "expected"), [("extract", 0), ("server", 0), ("manifest", 0), ("verify", TORCH)]
)
def test_extracting_jobs_start_without_torch(script: str, expected: int) -> None:
    """Verifying ones need it: with them this test shows that it would see it."""
    code = WITHOUT_TORCH.replace("TORCH", str(TORCH))
    done = subprocess.run(
        [sys.executable, "-c", code, REPOSITORY / "scripts" / f"{script}.py"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == expected, done.stderr


def test_a_dry_run_asks_for_the_models_content_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from draftstates import workflow;"
        " print(workflow.present_model_digest(Path(sys.argv[1]))); "
    )
    code += f"sys.exit({TORCH} if 'torch' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code, tiny_model(tmp_path / "tiny")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout[:8]) == (0, "content-"), done.stderr


def test_the_configuration_is_read_without_heavy_packages() -> None:
    """Snakemake parses it for every job of a cluster, and has pydantic and yaml loaded already."""
    heavy = {"torch", "numpy", "pandas", "pyarrow", "transformers", "jsonschema", "snakemake"}
    code = (
        "import sys; from draftstates.config import load; load('config.yaml');"
        f" sys.exit(' '.join({heavy} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stderr.strip() == ""


def test_verification_parses_a_shards_ids_a_fixed_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "tiny")
    parsed: list[int] = []
    loads = json.loads

    def count(text: str | bytes, **options: object) -> object:
        parsed.append(1)
        return loads(text, **options)

    counts = []
    for samples in (5, 50):
        files = write(capture(model, samples=samples), tmp_path / str(samples))
        parts = {
            "spec": files.plan.capture,
            "checks": files.plan.checks,
            "model": model,
            "shard": files.shard,
            "recaptures": files.recaptures,
            "receipts": files.receipts,
        }
        with monkeypatch.context() as patch:
            patch.setattr(json, "loads", count)
            parsed.clear()
            verify_shard(files.plan.shards[0], **parts, threads=1)
        counts.append(len(parsed))
        assert len(Shard(files.shard).header.sample_ids) == samples
    assert counts[0] == counts[1]
