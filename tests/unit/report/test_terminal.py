"""A terminal shows what matters of a run; Snakemake's log has all of it."""

import io
import logging
from pathlib import Path

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from draftstates.report.terminal import quieten


@pytest.fixture
def logger(tmp_path: Path):
    """Return a logger with a terminal and a log file, as Snakemake's has them."""
    logger = logging.Logger("snakemake-test", logging.INFO)
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    quieten(logger.handlers, rewrite=True)
    yield logger, lambda: stream.getvalue().splitlines(), tmp_path / "log"
    logger.handlers[1].close()


SHOWN = [
    (logging.INFO, None, "server: starting for 3.0 s, then it tests itself; its log: x"),
    (logging.INFO, None, "capture: 20 of 400 tokens (5%)"),
    (logging.INFO, "RUN_INFO", "Job stats:"),
    (logging.INFO, "JOB_FINISHED", "Finished jobid: 3 (Rule: plan)"),
    (logging.WARNING, None, "the disk is nearly full"),
    (logging.ERROR, "JOB_ERROR", "Error in rule extract:"),
    (logging.ERROR, None, "1 job failed:"),
]
HIDDEN = [
    (logging.INFO, "JOB_INFO", "rule extract:\n    reason: Params have changed"),
    (logging.INFO, "SHELLCMD", "exec python extract.py"),
    (logging.INFO, "PROGRESS", "5 of 30 steps (17%) done"),
    (logging.INFO, "JOB_FINISHED", "Finished jobid: 7 (Rule: extract)"),
    (logging.INFO, "JOB_FINISHED", "Finished jobid: 8 (Rule: verify)"),
    (logging.INFO, None, "Select jobs to execute..."),
    (logging.INFO, None, "Execute 2 jobs..."),
]


@pytest.mark.parametrize(("level", "event", "text"), SHOWN + HIDDEN)
def test_jobs_do_not_scroll_by_and_a_failed_one_does(logger, level, event, text) -> None:
    log, seen, file = logger
    extra = {"event": LogEvent[event]} if event else {}
    log.log(level, text, extra=extra)
    assert seen() == (text.splitlines() if (level, event, text) in SHOWN else [])
    assert file.read_text() == f"{text}\n", "the file has every line"
