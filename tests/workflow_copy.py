"""A copy of the workflow in another folder, as the tests run it."""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
WORKFLOW = ("Snakefile", "workflow", "rules", "scripts", "draftstates", "schemas", "profiles")


def copy_workflow(folder: Path, *others: str) -> None:
    """Copy the workflow, and other files and folders of the repository by their names."""
    ignore = shutil.ignore_patterns("__pycache__", "*.sif")
    for name in (*WORKFLOW, *others):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy2(source, folder / name)
