"""Look at Slurm jobs every two seconds.

The plug-in waits ten seconds longer after each look that found no job at its end. The jobs of the
tests take seconds.
"""

from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

RemoteExecutor.next_seconds_between_status_checks = property(
    lambda executor: 2.0, lambda executor, seconds: None
)
