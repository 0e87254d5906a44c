"""The process of a server job.

Command: `python -m draftstates.server.slurm.job RUN_FOLDER GENERATION REPLICA`.

The process starts the server on its node, runs the self-test, and announces the server. It ends
when the server ends, when it gets TERM, and when the heartbeat of the run stops.
"""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import write_private
from draftstates.server.address import read_key_config
from draftstates.server.launchers import LocalServer
from draftstates.server.processes import become_subreaper, end_descendants, exit_on_term
from draftstates.server.replica import Replica, ServerFailed
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.folder import Pulse, RunFolder, ServerFolder
from draftstates.server.slurm.network import own_address

_POLL_SECONDS = 0.5


def serve(run: RunFolder, settings: ServerSettings, *, generation: str, index: int) -> None:
    """Start the server and watch it until the run is gone.

    Args:
        run: the run folder.
        settings: settings of the server.
        generation: identifies the server in the run folder.
        index: number of the replica, counted from 0.

    Raises:
        ServerFailed: the server died, was not ready in time, or failed its self-test.
        UserError: the server cannot be bound to an address of this node.
    """
    pulse, place = Pulse(run.heartbeat), run.server(generation)
    host = own_address(interface=settings.slurm.interface, peer=run.host.read_text())
    server = LocalServer(settings, replica=index, key_config=run.key_config, host=host)
    print(
        f"{time.strftime('%F %T')} server at {server.url} on {socket.gethostname()}, log"
        f" {server.log}",
        flush=True,
    )
    api_key = read_key_config(run.key_config)
    replica = Replica(settings, server, api_key=api_key, folder=place.folder)
    while pulse.silence() <= settings.slurm.heartbeat_seconds:
        try:
            replica.tick()
        except ServerFailed as failure:
            raise failure.without(api_key) from None
        if replica.ready and not place.address.exists():
            write_private(
                place.address, {"url": server.url, "start_seconds": replica.start_seconds}
            )
        time.sleep(_POLL_SECONDS)
    print(f"{time.strftime('%F %T')} the run that this server worked for is gone", flush=True)


def main() -> None:
    """Run the server job of the command line, and leave an error in the run folder if it fails."""
    run, generation, index = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    exit_on_term()
    become_subreaper()
    place, stop_seconds = run.server(generation), 0.0
    job = f"server job {os.environ.get('SLURM_JOB_ID')} on {socket.gethostname()}"
    try:
        settings = ServerSettings.from_json(run.settings.read_text())
        stop_seconds = settings.stop_seconds
        serve(run, settings, generation=generation, index=index)
    except (ServerFailed, UserError) as failure:
        lasting = isinstance(failure, ServerFailed) and failure.lasting
        leave_error(run, place, f"{job}: {failure}", lasting=lasting)
    # the job waited in the queue for longer than its run lasted
    except FileNotFoundError as error:
        print(f"{error.filename} is gone, and with it the run that this server was for", flush=True)
    except SystemExit:
        if not place.stop.exists():
            leave_error(
                run,
                place,
                f"{job} was told to end by Slurm: cancelled, preempted or at its time limit",
            )
        raise
    finally:
        end_descendants(stop_seconds)


def leave_error(run: RunFolder, place: ServerFolder, error: str, *, lasting: bool = False) -> None:
    """Print an error, and write it for the supervisor and the clients."""
    print(f"{time.strftime('%F %T')} {error}", flush=True)
    # A run that ends removes its heartbeat first, then cancels its servers and removes the folder.
    # From then on nobody would read the error.
    if run.heartbeat.exists():
        with contextlib.suppress(FileNotFoundError):
            write_private(place.failed, {"error": error, "lasting": lasting})


if __name__ == "__main__":
    main()
