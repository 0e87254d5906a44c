"""The rules by which the Snakemake Workflow Catalog lists a workflow and its usage.

They are those of its README and of its `scripts/generate-catalog.py`.
"""

import re
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENTS = {"conda", "apptainer", "singularity", "apptainer+conda", "singularity+conda"}


def settings() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text())


def test_the_workflow_is_found() -> None:
    readme = (REPOSITORY / "README.md").read_text().lower()
    assert "snakemake" in readme
    assert "workflow" in readme
    # the usage is listed of a workflow/Snakefile alone; the file itself lies at the top
    named = (REPOSITORY / "workflow" / "Snakefile").read_text()
    (included,) = re.findall(r'^include: "(.*)"$', named, re.MULTILINE)
    assert (REPOSITORY / "workflow" / included).resolve() == REPOSITORY / "Snakefile"
    assert list((REPOSITORY / "rules").glob("*.smk"))


def test_its_usage_is_listed() -> None:
    usage = settings()["usage"]
    assert settings().keys() == {"usage"}
    assert usage.keys() <= {"mandatory-flags", "software-stack-deployment", "report"}
    assert usage["report"] is True
    assert (REPOSITORY / "rules" / "report").is_dir()
    deployment = usage["software-stack-deployment"]
    assert deployment
    assert deployment.keys() <= DEPLOYMENTS
    # apptainer: the rules name an image; conda: a rule would name an environment
    rules = "".join(path.read_text() for path in REPOSITORY.glob("rules/*.smk"))
    snakefile = (REPOSITORY / "Snakefile").read_text()
    assert ("container:" in snakefile) == deployment.get("apptainer", False)
    assert bool(re.search(r"^ *conda:", snakefile + rules, re.MULTILINE)) == deployment.get(
        "conda", False
    )


def test_its_configuration_is_explained() -> None:
    text = (REPOSITORY / "config" / "README.md").read_text()
    schema = yaml.safe_load((REPOSITORY / "schemas" / "config.schema.yaml").read_text())
    named = set(re.findall(r"`(\w+)`", text))
    assert schema["properties"].keys() <= named
    # the catalog shows the page alone: paths in it are those of the repository
    paths = re.findall(r"`((?:docs|presets|profiles|schemas)/[\w./-]*)`", text)
    assert len(paths) >= 8
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
