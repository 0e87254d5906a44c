"""A run of the workflow: its run folder and the supervisor of its server jobs."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import open_log
from draftstates.server.processes import Process
from draftstates.server.slurm.folder import RUN_FOLDER_VARIABLE, RunFolder, beat


def start_run(root: Path, *, owner: Process) -> RunFolder:
    """Make a run folder, and start its supervisor.

    All later child processes of this process find the folder by DRAFTSTATES_RUN_FOLDER.

    Args:
        root: folder in which the run folder is made.
        owner: a process of this machine; the run ends with it.
    """
    run = RunFolder(root.resolve() / f"run-{secrets.token_hex(4)}")
    run.make()
    run.host.write_text(socket.gethostname())
    beat(run.heartbeat)
    output = open_log(root / "supervisor.log")
    try:
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "draftstates.server.slurm.supervisor",
                str(run.folder),
                str(owner),
            ],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    finally:
        os.close(output)
    os.environ[RUN_FOLDER_VARIABLE] = str(run.folder)
    return run


def present_run() -> RunFolder | None:
    """Return the run that this process belongs to, or None without a run.

    Raises:
        UserError: the run is over.
    """
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if not folder:
        return None
    run = RunFolder(Path(folder))
    if not run.heartbeat.exists():
        raise UserError(
            f"the run that {RUN_FOLDER_VARIABLE} names is over ({folder}), so no server would work"
            " for it"
        )
    return run
