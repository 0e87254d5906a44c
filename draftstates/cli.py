"""What every command in `scripts/` shares: one way to report a user's error."""

import sys
from collections.abc import Callable

from draftstates.errors import UserError


def run(main: Callable[[], None]) -> None:
    """Call `main`; a `UserError`, or a file that the system refuses, becomes one line on stderr and exit status 1, never a traceback."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.filename is None:
            raise  # of no file that the user named
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
