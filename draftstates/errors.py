"""Errors that users read, and the one way in which commands report them."""

import errno
import os
import shlex
import signal
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# argparse ends with the same status where arguments are wrong, which is a lasting fault too
LASTING_STATUS = 2
# the last line of an error that a second attempt would meet again: no step is retried after it
NO_SECOND_ATTEMPT = "no second attempt is made in this run: it would end in the same way"
# controls, formats, lone surrogates, separators of lines and paragraphs
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# the last two join letters and emoji
_SHOWN_AS_THEY_ARE = "\n\t\u200c\u200d"


_complete = False


class UserError(Exception):
    """A fault that the user can correct.

    The message names the file, row or sample, the expected and the found value, and a remedy.
    """


class LastingError(UserError):
    """A fault that a second attempt would meet again, so that none is worth its time."""


class ShardRefused(UserError):
    """The error for a shard that failed verification.

    Attributes:
        origins: ids of the shards from which its samples at fault were copied.
    """

    def __init__(self, message: str, *, origins: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.origins = origins


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 shard`, `2 shards`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def make_again(purpose: str, *paths: Path) -> str:
    """Return the remedy for files that a run makes once they are gone, with the command."""
    return f"{purpose}: rm -f {shlex.join(map(str, paths))} && snakemake --cores all"


def capture_again(path: Path) -> str:
    """Return the remedy for a damaged file of a shard, with the command."""
    return make_again("to capture the shard again", path)


def visible(text: str) -> str:
    """Return a text with a name in place of each character that would change how it is shown.

    Such characters are controls, which a terminal obeys, and those that turn the reading direction.
    """
    return "".join(
        character
        if character in _SHOWN_AS_THEY_ARE or unicodedata.category(character) not in _UNSEEN
        else f"⟨U+{ord(character):04X}⟩"
        for character in text
    )


def run_command(main: Callable[[], None], *, lasting: bool = False) -> None:
    """Call `main`, and report its errors to the user.

    A `UserError`, or a file that the system refuses, becomes one line on stderr and exit status 1
    (a `LastingError`: 2), never a traceback. The signal TERM, as from `scancel` or at a time limit,
    raises SystemExit(143) in `main`, so that `main` can clean up; a second TERM ends the process at
    once. After `result_is_complete`, TERM has no effect.

    Args:
        lasting: whether a `UserError` of this command comes back at every attempt.
    """
    global _complete
    process, _complete = os.getpid(), False

    def leave(number: int, frame: FrameType | None) -> None:
        if _complete and os.getpid() == process:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:
            # a forked worker has no files to clean up, and its pool waits for its end
            os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        main()
    except LastingError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(LASTING_STATUS)
    except UserError as error:
        sys.exit(f"error: {visible(str(error))}" + (f"\n{NO_SECOND_ATTEMPT}" if lasting else ""))
    except BrokenPipeError:
        # The reader, such as `head`, has read enough. The interpreter would flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # the error of a write without room on the disk names no file
            where = error.filename or "the folder that this step writes to"
            sys.exit(f"error: {visible(str(where))}: {error.strerror}; make room and run again")
        if error.filename is None:
            # the error names no file that the user could correct: the traceback helps more
            raise
        sys.exit(f"error: {visible(str(error.filename))}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # the interpreter puts the system's action in the place of a handler when it ends
        signal.signal(signal.SIGTERM, signal.SIG_IGN if _complete else before)


def result_is_complete() -> None:
    """Have TERM make no failure of the present command, whose result has its final name.

    Snakemake removes the output of a job that fails, and a shard costs more than the second that
    the command needs to end.
    """
    global _complete
    _complete = True
