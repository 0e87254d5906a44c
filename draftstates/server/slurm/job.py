"""The process of a server job.

Command: `python -m draftstates.server.slurm.job RUN_FOLDER GENERATION REPLICA`.

The process starts the server on its node, runs the self-test, and announces the server. It ends
when the server ends, when it gets TERM, when its supervisor gives it up, and when the heartbeat of
the run stops.
"""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from draftstates.errors import UserError
from draftstates.server.address import read_key_config
from draftstates.server.folder import Pulse, RunFolder, ServerFolder, is_there, leave_error, say
from draftstates.server.lasting import Failure
from draftstates.server.local import LocalServer
from draftstates.server.processes import become_subreaper, end_descendants, exit_on_term
from draftstates.server.replica import Replica
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.network import own_address

_POLL_SECONDS = 0.5


def serve(
    run: RunFolder, settings: ServerSettings, *, place: ServerFolder, number: int
) -> Failure | None:
    """Start the server and watch it until the run is gone or needs it no more.

    Args:
        run: the run folder.
        settings: settings of the server.
        place: folder of the server in the run folder.
        number: number of the replica, counted from 0.

    Returns:
        Why the server died, was not ready in time, or failed its self-test; else None.

    Raises:
        FileNotFoundError: the run is gone.
        UserError: the server cannot be bound to an address of this node.
    """
    if is_there(place.stop, unknown=False):
        return None
    owner, peer = run.read_owner()
    pulse = Pulse(owner, run.heartbeat)
    host = own_address(interface=settings.slurm.interface, peer=peer)
    # the key of this run's supervisor at the start: one that replaces it ends this server
    api_key = read_key_config(run.key_config)
    server = LocalServer(settings, replica=number, key_config=run.key_config, host=host)
    say(f"server at {server.url} on {socket.gethostname()}, log {server.log}")
    replica = Replica(settings, server, api_key=api_key, number=number, place=place)
    while not (
        is_there(place.stop, unknown=False) or pulse.has_stopped(settings.slurm.heartbeat_seconds)
    ):
        try:
            if failure := replica.failure():
                return failure.without(api_key)
        except FileNotFoundError:
            raise
        # a file server may be unavailable for a moment
        except OSError as error:
            say(str(error))
        time.sleep(_POLL_SECONDS)
    say("the run that this server worked for is gone, or needs it no more")
    return None


def main() -> None:
    """Run the server job of the command line, and leave an error in the run folder if it fails."""
    run, generation, number = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    exit_on_term()
    become_subreaper()
    place, stop_seconds = run.server(generation), 0.0
    job = f"server job {os.environ.get('SLURM_JOB_ID')} on {socket.gethostname()}"
    error, lasting = "", False
    try:
        settings = ServerSettings.from_json(place.settings.read_text())
        stop_seconds = settings.stop_seconds
        if failure := serve(run, settings, place=place, number=number):
            error, lasting = f"{job}: {failure.error}", failure.lasting
    except UserError as fault:
        error = f"{job}: {fault}"
    # the job waited in the queue for longer than its run lasted
    except FileNotFoundError as fault:
        say(f"{fault.filename} is gone, and with it the run that this server was for")
    except SystemExit:
        if not is_there(place.stop, unknown=False):
            error = f"{job} was told to end by Slurm: cancelled, preempted or at its time limit"
        raise
    finally:
        if error:
            say(error)
            # what the job has started ends, although nobody reads why
            with contextlib.suppress(OSError):
                leave_error(run, place, error, lasting=lasting)
        end_descendants(stop_seconds)


if __name__ == "__main__":
    main()
