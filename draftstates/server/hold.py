"""A server that a person keeps up, until Ctrl-C."""

import time

from draftstates.errors import UserError
from draftstates.server.address import health
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings

_POLL_SECONDS = 1.0
# a busy server answers late
_HEALTH_SECONDS = 30.0


def hold(settings: ServerSettings) -> None:
    """Hold a lease and print the address of the server, until KeyboardInterrupt.

    Raises:
        UserError: the server does not start, or ends by itself.
    """
    with lease(settings) as address:
        key = settings.api_key_file if settings.launcher == "external" else settings.state
        print(
            f"ready at {address.url}; its key is in {key}; its log is {settings.log}; Ctrl-C"
            " ends it",
            flush=True,
        )
        try:
            while not (problem := health(address.url, seconds=_HEALTH_SECONDS)):
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            return
        raise UserError(f"the server does not answer any more: {problem}")
