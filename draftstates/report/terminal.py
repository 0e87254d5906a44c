"""A quiet terminal: the lines of thousands of jobs are in Snakemake's log alone."""

import logging
import re
from collections.abc import Iterable

# Events of single jobs, and how Snakemake gets on by its own count.
_OF_JOBS = {"JOB_INFO", "GROUP_INFO", "JOB_STARTED", "SHELLCMD", "PROGRESS", "RESOURCES_INFO"}
_NOISE = ("Select jobs to execute", "Execute ", "DAG of jobs will be updated", "Touching output")
_FINISHED = re.compile(r"\(Rule: (\w+)\)")
# Rules with a job for each shard: one line a minute tells of them together.
_OF_SHARDS = {"extract", "verify", "all"}


class Quiet(logging.Filter):
    """Filter of a terminal: warnings and errors pass, and of single jobs the end of each stage."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        event = getattr(getattr(record, "event", None), "name", None)
        if event in _OF_JOBS:
            return False
        message = record.getMessage()
        if event == "JOB_FINISHED":
            found = _FINISHED.search(message)
            return bool(found) and found[1] not in _OF_SHARDS
        return not message.startswith(_NOISE)


def quieten(handlers: Iterable[logging.Handler]) -> None:
    """Filter what terminals among a logger's handlers show; files get all lines as before."""
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(
            handler, logging.FileHandler
        ):
            handler.addFilter(Quiet())
