"""Changes between two runs of a workspace: of rows, and of everything that must not matter."""

import os
import shutil
from pathlib import Path

from workspace import Workspace, chat, make_tiny_model

# --- changes of the data ---


def edit_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    rows[17] = chat("edited")
    workspace.write_rows(rows)


def remove_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    workspace.write_rows([*rows[:26], *rows[27:]])


def exclude_sample(workspace: Workspace) -> None:
    import pyarrow.parquet as pq

    names = pq.read_table(workspace.results / "tokens" / "one.parquet", columns=["sample_id"])[
        "sample_id"
    ].to_pylist()
    workspace.config["exclude"] = [names[4]]


def append_rows(workspace: Workspace) -> None:
    workspace.write_rows([*workspace.rows(), *(chat(f"new-{i}") for i in range(12))])


# --- a change of the model ---


def replace_weights(workspace: Workspace, tokenizer: Path) -> None:
    """Put other weights in the file of the first ones, of the same size and modification time."""
    other = workspace.folder / "other"
    make_tiny_model(other, tokenizer, seed=1)
    weights = workspace.folder / "models" / "tiny" / "model.safetensors"
    before = weights.stat()
    shutil.copy(other / "model.safetensors", weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size


# --- changes that decide no number ---


def reorder_sources(workspace: Workspace) -> None:
    workspace.config["data"]["sources"].reverse()


def change_image(workspace: Workspace) -> None:
    workspace.edit("Snakefile", "container: image_of_steps()", 'container: "envs/other.sif"')
    (workspace.folder / "other.sif").touch()
    workspace.config["containers"] = {"sglang": "other.sif", "sglang_args": ["--bind=/data"]}


def change_rule_text(workspace: Workspace) -> None:
    workspace.edit(
        "rules/extract.smk",
        'exec python "$DRAFTSTATES_SCRIPTS/extract.py"',
        'exec python  -u "$DRAFTSTATES_SCRIPTS/extract.py"',
    )
    workspace.edit(
        "rules/extract.smk", "resources:\n", "params:\n        added=1,\n    resources:\n"
    )
    workspace.edit("rules/extract.smk", "model=ancient", "other=__file__,\n        model=ancient")


def change_script(workspace: Workspace) -> None:
    for path in (
        "scripts/extract.py",
        "scripts/server.py",
        "draftstates/extract/extract.py",
        "draftstates/extract/client.py",
        "draftstates/plan/plan.py",
    ):
        with open(workspace.folder / path, "a") as file:
            file.write("\n# another line\n")


def change_profile(workspace: Workspace) -> None:
    workspace.edit("profiles/default/profile.yaml", "streams=4", "streams=1")
    with open(workspace.folder / "profiles/default/profile.yaml", "a") as file:
        file.write(
            "set-threads: {extract: 2, verify: 2}\nset-resources: {extract: {mem_mb: 1000}}\n"
        )


def change_server(workspace: Workspace) -> None:
    """Change concurrency, launcher, address (with its port), and flags."""
    workspace.config["extract"] = {"tokens_in_flight": 1000}
    workspace.config["checks"] = {"recapture_fraction": 0.5}
    workspace.config["server"] = {
        "launcher": "external",
        "url": "http://127.0.0.1:12345",
        "args": ["--log-level", "info"],
        "writers": 2,
    }


def change_attestation(workspace: Workspace) -> None:
    (attestation,) = workspace.results.glob("*/server.json")
    attestation.write_text("{}")


def remove_attestation(workspace: Workspace) -> None:
    (attestation,) = workspace.results.glob("*/server.json")
    attestation.unlink()


def touch_everything(workspace: Workspace) -> None:
    """Give all inputs of the capture the present time, as a copy or a checkout does."""
    for folder in (
        workspace.results / "tokens",
        *(workspace.folder / name for name in ("models", "scripts", "rules", "draftstates")),
    ):
        for path in folder.rglob("*"):
            path.touch()


def move_model(workspace: Workspace) -> None:
    """Move the model to another folder under another name.

    The folder's name is the model's name too, if the configuration gives none.
    """
    (workspace.folder / "elsewhere").mkdir()
    shutil.move(workspace.folder / "models" / "tiny", workspace.folder / "elsewhere" / "renamed")
    workspace.config["model"]["path"] = str(workspace.folder / "elsewhere" / "renamed")


NO_CHANGES = [
    *(reorder_sources, change_image, change_rule_text, change_script, change_profile),
    *(change_server, change_attestation, remove_attestation, touch_everything, move_model),
]
