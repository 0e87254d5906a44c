"""What a failed run ends with: the reason of each failed job, out of its log or of how it ended."""

import enum
import logging
import signal
from pathlib import Path

import pytest

from draftstates.report.failures import FailedJobs, Failure, WithoutPlaces, summary

EMPTY = "error: the log is empty: the job was killed (out of memory?), or the disk is full"
Event = enum.Enum("Event", ["ERROR", "JOB_ERROR", "JOB_FINISHED"])


def failure(
    log: Path, text: str, *, rule: str = "verify", ended: signal.Signals | None = None
) -> Failure:
    log.write_text(text)
    return Failure(rule=rule, logs=(str(log),), signal=ended)


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [
        ("10 of 20 rows\nerror: a.jsonl: bad\n", None, "error: a.jsonl: bad"),
        ("error: first\nmore\nerror: last\nits lines\n", None, "error: last\nits lines"),
        ("usage: x.py\nx.py: error: no --plan\n", None, "x.py: error: no --plan"),
        ("Traceback …\n  File …\nKeyError: 'rows'\n", None, "error: KeyError: 'rows'"),
        ("", None, EMPTY),
        ("10 rows\n", signal.SIGTERM, "error: ended by signal 15 (SIGTERM)"),
        ("error: found\n", signal.SIGKILL, "error: found"),
        *(
            (text, signal.SIGKILL, "error: killed by signal 9 (SIGKILL), perhaps out of memory")
            for text in ("", "10 of 20 rows\n")
        ),
    ],
)
def test_the_reason_is_the_last_error_of_the_log_or_what_ended_the_job(
    tmp_path: Path, text: str, ended: signal.Signals | None, reason: str
) -> None:
    assert failure(tmp_path / "log", text, ended=ended).reason() == reason


def test_a_log_that_is_missing_and_one_without_an_end_give_a_reason(tmp_path: Path) -> None:
    assert Failure("verify", (str(tmp_path / "gone"),), None).reason() == EMPTY
    long = failure(tmp_path / "log", "error: it died; its log:\n" + "line\n" * 1000 + "why\n")
    lines = long.reason().splitlines()
    assert lines[0] == "error: it died; its log:"
    assert lines[-1] == "why"
    assert len(lines) == 30


def test_errors_come_in_the_order_of_the_data_and_equal_ones_once(tmp_path: Path) -> None:
    failures = [
        failure(tmp_path / "0", "error: page\n", rule="report_page"),
        *(
            failure(tmp_path / f"{digit}", f"error: shard {digit * 32}: bad\n", rule="extract")
            for digit in "123"
        ),
        failure(tmp_path / "4", "error: no GPU\n", rule="server"),
    ]
    assert summary(failures, rules=["server", "extract", "report_page"]).splitlines() == [
        "5 jobs failed:",
        f"rule server ({tmp_path}/4):",
        "error: no GPU",
        f"rule extract ({tmp_path}/1, and 2 more with this error):",
        f"error: shard {'1' * 32}: bad",
        f"rule report_page ({tmp_path}/0):",
        "error: page",
    ]


def test_many_different_errors_of_a_rule_are_counted(tmp_path: Path) -> None:
    failures = [failure(tmp_path / str(i), f"error: number {i}\n") for i in range(10)]
    assert summary(failures, rules=["verify"]).splitlines()[-1] == (
        "rule verify: 7 more jobs with other errors"
    )


def log(jobs: FailedJobs, event: Event | None, message: str = "", **fields: object) -> None:
    record = logging.makeLogRecord({"msg": message, "event": event, **fields})
    jobs.emit(record)


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        ("Command 'exec …' died with <Signals.SIGKILL: 9>.", signal.SIGKILL),
        ("Command 'exec …' returned non-zero exit status 137.", signal.SIGKILL),
        ("Command 'exec …' returned non-zero exit status 143.", signal.SIGTERM),
        ("Command 'exec …' returned non-zero exit status 1.", None),
        ("Command 'exec …' returned non-zero exit status 255.", None),
        ("something else", None),
    ],
)
def test_the_signal_is_that_of_the_message_before_the_error_of_the_job(
    message: str, ended: signal.Signals | None
) -> None:
    jobs = FailedJobs()
    log(jobs, Event.ERROR, message)
    log(jobs, Event.JOB_ERROR, jobid=1, rule_name="plan", log=["a.log"])
    log(jobs, Event.JOB_ERROR, jobid=2, rule_name="verify", log=["b.log"])
    assert jobs.failed() == [
        Failure("plan", ("a.log",), ended),
        Failure("verify", ("b.log",), None),
    ]


def test_a_job_that_succeeds_later_has_not_failed() -> None:
    jobs = FailedJobs()
    log(jobs, Event.JOB_ERROR, jobid=1, rule_name="server", log=["a.log"])
    log(jobs, None, "a message of another kind")
    log(jobs, Event.JOB_FINISHED, job_id=1)
    assert jobs.failed() == []


@pytest.mark.parametrize(
    ("exception", "error", "cut"),
    [
        ("InputFunctionException", "WorkflowError", True),
        ("InputFunctionException", "KeyError", False),
        ("WorkflowError", "WorkflowError", False),
    ],
)
def test_a_users_error_in_an_input_function_has_no_places(
    exception: str, error: str, cut: bool
) -> None:
    said = f"{exception} in rule a:\nError:\n  {error}:\n    100% gone\nWildcards:\n"
    place = "\nTraceback:\n  File x, line 1, in f"
    record = logging.makeLogRecord({"msg": said + place, "exception": exception})
    assert WithoutPlaces().filter(record)
    assert record.getMessage() == (said if cut else said + place)
