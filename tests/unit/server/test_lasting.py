"""Which ends of an engine come back at every start, and for whom a record of one counts."""

import signal

import pytest

from draftstates.errors import LASTING_STATUS, LastingError, UserError, run_command
from draftstates.server.lasting import Failure, refused_by_engine

USAGE = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --nope"
RAISED = """\
[2026-12-01 10:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3127, in run_scheduler_process
    scheduler = Scheduler(
{}
[2026-12-01 10:00:00] Received sigquit from a child process. It usually means the child failed.
"""
MISSING = "ValueError: Unsupported architectures: ['NopeForCausalLM']"
TWO_RANKS = RAISED.format("torch.OutOfMemoryError: no room") + RAISED.format("KeyError: 1")
# the parent's own error about its child's end
PARENT = RAISED.format(MISSING) + RAISED.format("RuntimeError: Rank 0 scheduler died")


@pytest.mark.parametrize(
    ("code", "log", "lasting"),
    [
        (2, USAGE, True),
        (127, "cannot start /no/such/program: No such file or directory", True),
        (1, "draftstates: cannot capture with sglang 0.5.23: the model has changed", True),
        (-signal.SIGKILL, RAISED.format(MISSING), True),
        (1, PARENT, True),
        (1, RAISED.format("safetensors_rust.SafetensorError: HeaderTooLarge"), True),
        (1, RAISED.format("AssertionError"), True),
        (1, RAISED.format("KeyError: 'model.norm.weight'"), True),
        (-signal.SIGKILL, "Loading weights: 50 %", False),
        (1, "", False),
        (3, "the machine is on fire", False),
        (1, RAISED.format("torch.OutOfMemoryError: CUDA out of memory."), False),
        (1, RAISED.format("RuntimeError: Not enough memory."), False),
        (1, RAISED.format("OSError: [Errno 98] Address already in use"), False),
        (1, RAISED.format("ValueError: port 30000 is: Address already in use"), False),
        (1, RAISED.format("torch.distributed.DistBackendError: NCCL error"), False),
        (1, RAISED.format("TimeoutError: the store waited for 600 s"), False),
        # one rank ran out of memory, and the other one fell over what that left behind
        (
            1,
            RAISED.format("torch.OutOfMemoryError: out of memory") + RAISED.format("KeyError: 1"),
            False,
        ),
    ],
)
def test_an_end_is_lasting_if_the_engine_refused_what_it_was_given(
    code: int, log: str, lasting: bool
) -> None:
    assert refused_by_engine(code, log) == lasting


def test_an_error_that_led_to_another_one_does_not_count() -> None:
    chain = (
        "Traceback (most recent call last):\nKeyError: 'host'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nRuntimeError: no device\n"
    )
    assert not refused_by_engine(1, chain)
    assert refused_by_engine(1, chain.replace("RuntimeError", "ValueError"))


def test_words_of_a_setting_are_no_error() -> None:
    settings = "server_args=ServerArgs(watchdog_timeout=300, nccl_port=None)\n"
    assert refused_by_engine(1, settings + RAISED.format(MISSING))


def test_only_a_lasting_error_says_that_no_second_attempt_is_made() -> None:
    assert Failure("killed").for_clients() == "killed"
    refused = Failure("refused by s3cret", lasting=True).without("s3cret")
    assert refused.for_clients().startswith("refused by <api key>\nno second attempt is made")


def test_a_command_says_by_its_status_that_its_fault_lasts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> object:
        def main() -> None:
            raise error

        with pytest.raises(SystemExit) as ended:
            run_command(main)
        return ended.value.code

    assert fail(LastingError("the rows differ")) == LASTING_STATUS
    assert capsys.readouterr().err == "error: the rows differ\n"
    assert fail(UserError("no answer")) == "error: no answer"
