"""What may change between two runs of a workspace: rows, and everything that is not to matter."""

import shutil

from workspace import Workspace, chat

# --- changes of the data ---


def edit_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    rows[17] = chat("edited")
    workspace.write_rows(rows)


def insert_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    workspace.write_rows([*rows[:9], chat("inserted"), *rows[9:]])


def remove_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    workspace.write_rows([*rows[:26], *rows[27:]])


def exclude_sample(workspace: Workspace) -> None:
    import pyarrow.parquet as pq

    names = pq.read_table(workspace.results / "tokens" / "one.parquet", columns=["sample_id"])["sample_id"].to_pylist()
    workspace.config["exclude"] = [names[4]]


def append_rows(workspace: Workspace) -> None:
    workspace.write_rows([*workspace.rows(), *(chat(f"new-{i}") for i in range(12))])


# --- changes that decide no number ---


def reorder_sources(workspace: Workspace) -> None:
    workspace.config["data"]["sources"].reverse()


def change_image(workspace: Workspace) -> None:
    workspace.edit("Snakefile", "container: step_image()", 'container: "envs/other.sif"')
    (workspace.folder / "other.sif").touch()
    workspace.config["containers"] = {"sglang": "other.sif", "sglang_args": ["--bind=/data"]}


def change_rule_text(workspace: Workspace) -> None:
    workspace.edit("rules/extract.smk", "exec python scripts/extract.py", "exec python  -u scripts/extract.py")
    workspace.edit("rules/extract.smk", "resources:\n", "params:\n        added=1,\n    resources:\n")
    workspace.edit("rules/extract.smk", "model=ancient", "other=__file__,\n        model=ancient")


def change_script(workspace: Workspace) -> None:
    for path in ("scripts/extract.py", "scripts/server.py", "draftstates/extract.py", "draftstates/client.py", "draftstates/plan.py"):
        with open(workspace.folder / path, "a") as file:
            file.write("\n# another line\n")


def change_profile(workspace: Workspace) -> None:
    workspace.edit("profiles/default/profile.yaml", "streams=4", "streams=1")
    with open(workspace.folder / "profiles/default/profile.yaml", "a") as file:
        file.write("set-threads: {extract: 2, verify: 2}\nset-resources: {extract: {mem_mb: 1000}}\n")


def change_server(workspace: Workspace) -> None:
    """Another concurrency, launcher, address (with its port), and flags."""
    workspace.config["extract"] = {"tokens_in_flight": 1000}
    workspace.config["checks"] = {"probe_fraction": 0.5}
    workspace.config["server"] = {"launcher": "external", "url": "http://127.0.0.1:12345", "args": ["--log-level", "info"], "writers": 2}


def change_attestation(workspace: Workspace) -> None:
    (attestation,) = workspace.results.glob("*/server.json")
    attestation.write_text("{}")


def remove_attestation(workspace: Workspace) -> None:
    (attestation,) = workspace.results.glob("*/server.json")
    attestation.unlink()


def touch_everything(workspace: Workspace) -> None:
    """A fresh age for all that goes into the capture, as a copy or a checkout gives it."""
    for folder in (workspace.results / "tokens", *(workspace.folder / name for name in ("models", "scripts", "rules", "draftstates"))):
        for path in folder.rglob("*"):
            path.touch()


def move_model(workspace: Workspace) -> None:
    """To another folder under another name, which is the model's name too where the configuration gives none."""
    (workspace.folder / "elsewhere").mkdir()
    shutil.move(workspace.folder / "models" / "tiny", workspace.folder / "elsewhere" / "renamed")
    workspace.config["model"]["path"] = str(workspace.folder / "elsewhere" / "renamed")


NO_CHANGES = [
    *(reorder_sources, change_image, change_rule_text, change_script, change_profile),
    *(change_server, change_attestation, remove_attestation, touch_everything, move_model),
]
