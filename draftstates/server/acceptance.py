"""Acceptance of servers: a client gets the address of a server only after its self-test."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from draftstates.errors import LASTING_STATUS, UserError
from draftstates.files import open_log, read_json, tail, write_private
from draftstates.server.address import Address, health, read_address
from draftstates.server.lasting import Failed, with_note
from draftstates.server.launchers import fill
from draftstates.server.processes import Process
from draftstates.server.settings import ServerSettings
from draftstates.server.state import State

# a busy server answers late
_EXTERNAL_HEALTH_SECONDS = 30.0


def selftest_arguments(
    settings: ServerSettings, candidate: Path
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of the self-test.

    Args:
        settings: settings of the server.
        candidate: file with the address that the self-test reads.
    """
    return fill(settings.selftest, {"{address}": str(candidate), "{python}": sys.executable}), {
        **os.environ,
        **settings.env,
    }


def selftest_failure(status: int, log: Path) -> str:
    """Return the message of a failed self-test, with the last lines of its log."""
    return f"the server failed its self-test (status {status}):\n{tail(log)}"


def external_address(settings: ServerSettings, state: State, *, owner: Process) -> Address:
    """Return the configured address, and test its server once for each owner.

    The caller holds the start lock.

    Raises:
        UserError: the key file cannot be read, no server answers, or the server fails the
            self-test.
    """
    assert settings.url is not None
    address = Address(
        url=settings.url.rstrip("/"), api_key=_read_key(settings.api_key_file), launcher="external"
    )
    accepted = {"owner": str(owner), "fingerprint": settings.fingerprint}
    known = read_json(state.accepted) or {}
    if {name: known.get(name) for name in accepted} == accepted:
        return dataclasses.replace(address, server=known.get("server"))
    if failed := Failed.read(state.failed):
        failed.refuse(fingerprint=settings.fingerprint, owner=str(owner))
    if problem := health(address.url, seconds=_EXTERNAL_HEALTH_SECONDS):
        raise UserError(f"server.url: no server is ready at {address.url}: {problem}")
    address.write(state.candidate)
    if settings.selftest:
        _run_selftest(settings, state, owner=owner)
        # The self-test adds the name of the server that has passed it.
        address = read_address(state.candidate)
    write_private(state.accepted, {**accepted, "server": address.server})
    return address


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


def _run_selftest(settings: ServerSettings, state: State, *, owner: Process) -> None:
    command, environment = selftest_arguments(settings, state.candidate)
    state.selftest_log.unlink(missing_ok=True)
    output = open_log(state.selftest_log)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            timeout=settings.start_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"the self-test of {settings.url} did not end within {settings.start_seconds:g} s"
        ) from error
    finally:
        os.close(output)
    if done.returncode:
        lasting = done.returncode == LASTING_STATUS
        failed = Failed(
            error=with_note(selftest_failure(done.returncode, state.selftest_log), lasting=lasting),
            lasting=lasting,
            fingerprint=settings.fingerprint,
            owners=(str(owner),),
        )
        failed.write(state.failed)
        raise UserError(failed.error)
