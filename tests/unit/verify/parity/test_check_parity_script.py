"""The rule's command: what it writes of right rows, and what it withdraws with wrong ones."""

import dataclasses
import json
import runpy
from pathlib import Path

import parity_models
import pytest
import yaml
from synthetic import plan_with
from test_check import rows_of, spec_of

from draftstates.paths import Capture, Results
from draftstates.records import Parity
from draftstates.shards.selftest_rows import SelftestRows

SCRIPT = Path(__file__).parents[4] / "scripts" / "check_parity.py"


class Run:
    """A results folder with a plan, an attestation, kept rows, and an old manifest."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = parity_models.make("qwen3", folder / "model")
        self.spec = spec_of(self.model)
        self.results = Results(folder / "results")
        self.capture: Capture = self.results.capture(self.spec.folder_name)
        self.capture.folder.mkdir(parents=True)
        plan = plan_with([], capture_folder=self.spec.folder_name)
        dataclasses.replace(plan, capture=self.spec).publish(self.results.plan)
        self.rows = rows_of(self.model, self.spec, tokens=20)
        self.capture.server.write_text(json.dumps({"capture_key": self.spec.key}))
        self.capture.manifest.write_text("{}")
        self._monkeypatch = monkeypatch

    def call(self, rows: SelftestRows, **checks: object) -> None:
        rows.save(self.capture.selftest_rows)
        config = {
            "data": {"sources": [{"name": "a", "files": ["none"]}], "max_tokens": 64},
            "model": {"path": str(self.model)},
            "capture": {"residual_layers": [1]},
            "checks": checks,
            "results": str(self.results.root),
        }
        path = self.results.root / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        given = {
            "config": path,
            "plan": self.results.plan,
            "code": "0",
            "threads": 1,
            "output": self.capture.parity,
            "html": self.capture.parity_page,
        }
        arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
        self._monkeypatch.setattr("sys.argv", ["check_parity.py", "--hold-server", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_right_rows_give_a_result_a_page_and_an_attestation(run: Run) -> None:
    run.call(run.rows)
    found = Parity.read(run.capture.parity)
    assert (found.result, found.selftest) == ("all 4 layers", "rows")
    assert found.asked == {"tokens": "4352", "layers": "all", "code": "0"}
    assert "all 4 layers" in run.capture.parity_page.read_text()
    attestation = json.loads(run.capture.server.read_text())
    assert attestation["capture_key"] == run.spec.key
    # with the layers' distances, lengths beyond the prompt, and experts that it does not reach
    assert attestation["parity"] == found.document()


def test_wrong_rows_are_withdrawn_with_attestation_and_manifest(run: Run) -> None:
    """Else the next run would compare the same rows again, whatever server it starts."""
    run.rows.prompts[0].states["r_3"] *= 1.1
    with pytest.raises(SystemExit, match=r"error: the server does not compute .*: r_3: the median"):
        run.call(run.rows)
    left = sorted(path.name for path in run.capture.folder.iterdir())
    assert left == []


def test_no_reference_is_an_error_only_where_parity_is_required(run: Run) -> None:
    config = run.model / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(SystemExit, match="checks.parity: required, but parity is none"):
        run.call(run.rows, parity="required")
    assert not run.capture.parity.exists()
    assert run.capture.selftest_rows.exists() and run.capture.server.exists()
    run.call(run.rows)
    assert Parity.read(run.capture.parity).result.startswith("none (weights of quant_method gptq")
