"""What every command in `scripts/` shares: one way to report a user's error, and to end when told to."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from draftstates.errors import UserError


def run(main: Callable[[], None]) -> None:
    """Call `main`; a `UserError`, or a file that the system refuses, becomes one line on stderr and exit status 1, never a traceback.

    TERM, as from `scancel` or at a time limit, raises SystemExit(143) in `main`, so that it clears up behind itself; a second one ends it
    at once.
    """
    process = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:  # a forked worker: nothing to clear up, and its pool waits for its end
            os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "where this step writes"  # a write that finds no room does not say of which file
            sys.exit(f"error: {where}: {error.strerror}; make room and run again")
        if error.filename is None:
            raise  # of no file that the user named
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
