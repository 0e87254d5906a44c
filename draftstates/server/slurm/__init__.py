"""Servers as Slurm jobs of their own.

`flock` does not reach other nodes, so everyone agrees by files in a run folder on the shared file system. The supervisor, a process
beside Snakemake, alone decides: it submits the server jobs, gives each client one of them, and cancels them at the end. Whoever works
for it, clients and server jobs, ends by itself when the supervisor's heartbeat stops.
"""
