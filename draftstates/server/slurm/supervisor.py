"""The supervisor, a process that decides about the server jobs of one run.

Command: `python -m draftstates.server.slurm.supervisor RUN_FOLDER OWNER`.

The supervisor runs beside the process that owns the run, in a session of its own. It ends when that
process ends, for whatever reason.
"""

import contextlib
import secrets
import shutil
import sys
import time
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import write_private
from draftstates.server.address import write_key_config
from draftstates.server.lasting import with_note
from draftstates.server.processes import Process, exit_on_term
from draftstates.server.replica import ServerFailed
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.folder import RunFolder, beat
from draftstates.server.slurm.leases import Leases
from draftstates.server.slurm.servers import Servers

_POLL_SECONDS = 0.5


class Supervisor:
    """The servers and leases of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._api_key = secrets.token_hex(32)
        write_key_config(run.key_config, self._api_key)
        self._leases = Leases(run.leases)
        self._servers = Servers(run, leases_on=self._leases.on)
        self._status = ""
        # errors of servers that end in the same way at every start, by fingerprint
        self._lasting: dict[str, str] = {}

    def tick(self) -> None:
        """Check leases and servers once, and act on the result."""
        self._leases.look()
        self._refuse_hopeless()
        settings = self._servers.settings
        try:
            if settings is None and (waiting := self._leases.waiting()):
                settings = waiting[0].settings
                self._servers.begin(settings)
            self._servers.look()
        except (ServerFailed, UserError) as failure:
            self._refuse_all(failure, settings)
        self._hand_out()
        self._end_if_idle()
        self._tell()

    def end(self) -> None:
        """Cancel all server jobs."""
        self._servers.end()

    def _refuse_hopeless(self) -> None:
        """Refuse leases on servers of which one has ended as every other one would."""
        for lease in self._leases.waiting():
            if error := self._lasting.get(lease.settings.fingerprint):
                lease.refuse(error)

    def _refuse_all(
        self, failure: ServerFailed | UserError, settings: ServerSettings | None
    ) -> None:
        lasting = isinstance(failure, ServerFailed) and failure.lasting
        error = with_note(str(failure), lasting=lasting)
        if lasting and settings:
            self._lasting[settings.fingerprint] = error
        for lease in self._leases.waiting():
            lease.refuse(error)

    def _hand_out(self) -> None:
        settings = self._servers.settings
        if settings is None:
            return
        for lease in self._leases.waiting():
            if lease.settings.fingerprint != settings.fingerprint:
                lease.refuse(f"{self._run.folder}: servers with other settings work for this run")
            elif server := self._servers.choose():
                lease.grant(server.generation, {"url": server.url, "api_key": self._api_key})

    def _end_if_idle(self) -> None:
        settings = self._servers.settings
        # a server with a long start stays for longer, because a new start would cost as much
        if settings and time.monotonic() - self._leases.last_there > max(
            settings.idle_seconds, self._servers.start_seconds
        ):
            self._servers.end()

    def _tell(self) -> None:
        if (status := self._servers.status()) != self._status:
            write_private(self._run.status, status)
            self._status = status


def main() -> None:
    """Run a supervisor until the owner of the command line is gone."""
    run, owner = RunFolder(Path(sys.argv[1])), Process.parse(sys.argv[2])
    exit_on_term()
    supervisor = Supervisor(run)
    try:
        while owner.is_alive():
            beat(run.heartbeat)
            try:
                supervisor.tick()
            # a file server may be unavailable for a moment
            except OSError as error:
                print(f"{time.strftime('%F %T')} {error}", flush=True)
            time.sleep(_POLL_SECONDS)
    finally:
        run.heartbeat.unlink(missing_ok=True)
        with contextlib.suppress(UserError, OSError):
            supervisor.end()
        shutil.rmtree(run.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
