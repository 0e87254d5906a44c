"""Every Slurm job takes itself for another machine, so that heartbeats decide as on a real cluster.

Python imports this module at its start.
"""

import os

if job := os.environ.get("SLURM_JOB_ID"):
    from draftstates.server import processes

    processes.machine = lambda: f"the node of job {job}"
