"""The launcher `external`: a server that somebody else has started, and that nobody here ends."""

from pathlib import Path

from draftstates.errors import UserError
from draftstates.server.address import health
from draftstates.server.lasting import Failure
from draftstates.server.settings import ServerSettings

# a busy server answers late
_HEALTH_SECONDS = 30.0


class ExternalServer:
    """The configured server.

    Its end is noticed by its clients, and its restart by the name that it gave the self-test.

    Raises:
        UserError: the key file cannot be read, or no server answers.
    """

    def __init__(self, settings: ServerSettings) -> None:
        assert settings.url
        self.url = settings.url.rstrip("/")
        self.api_key = _read_key(settings.api_key_file)
        if problem := health(self.url, seconds=_HEALTH_SECONDS):
            raise UserError(f"server.url: no server is ready at {self.url}: {problem}")

    def failure(self, *, ready: bool) -> Failure | None:
        """Return None: nothing here watches the server."""
        return None

    def end(self) -> None:
        """Do nothing."""

    def is_gone(self) -> bool:
        """Return True: no process is left to end."""
        return True

    def last_lines(self) -> str:
        """Return no lines: the log is elsewhere."""
        return ""


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise UserError(f"server.api_key_file: {path}: {error.strerror}") from error
    if not key:
        raise UserError(f"server.api_key_file: {path}: expected a key, found an empty file")
    return key
