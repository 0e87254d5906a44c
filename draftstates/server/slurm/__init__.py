"""Servers as Slurm jobs of their own.

`flock` does not reach other nodes, so supervisor, clients and server jobs agree by files in a run
folder on the shared file system. Only the supervisor, a process beside Snakemake, decides: it
submits the server jobs, gives each client one of them, and cancels them at the end. Clients and
server jobs end by themselves when the supervisor's heartbeat stops.
"""
