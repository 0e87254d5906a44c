"""Keep a server up for a person, until Ctrl-C."""

import time

from draftstates.errors import UserError
from draftstates.server.files import read_json
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings
from draftstates.server.state import State

_POLL_SECONDS = 0.5


def hold(settings: ServerSettings) -> None:
    """Hold a lease and say where the server is reached; returns on KeyboardInterrupt.

    Raises:
        UserError: the server does not start, or ends by itself.
    """
    file = State(settings.state.absolute()).address
    with lease(settings) as address:
        key = settings.api_key_file if settings.launcher == "external" else file
        print(f"ready at {' '.join(address.urls)}; its key is in {key}; its log is {settings.log}; Ctrl-C ends it", flush=True)
        try:
            while settings.launcher == "external" or read_json(file):
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            return
        raise UserError("the server has ended")
