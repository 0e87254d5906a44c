"""Agreement of servers: all that capture under one key have equal numeric settings.

The capture folder's attestation and that of the last self-test say what earlier servers had.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.extract.client import Captured
from draftstates.files import read_json

# What servers of one capture key must agree in; `kernels` follow from the hardware.
_HELD = "numbers"


def agreed_settings(captured: Iterable[Captured]) -> dict[str, dict[str, str]]:
    """Return the settings of a server, whose ranks must agree.

    Raises:
        UserError: the plug-in sent none, or two ranks differ.
    """
    settings: dict[str, dict[str, str]] | None = None
    for item in captured:
        if item.settings is None:
            raise UserError(
                "the server did not say which settings it computes with: its plug-in is of another"
                " version"
            )
        settings = settings or item.settings
        _compare(settings, item.settings, origin="another rank of the server")
    if settings is None:
        raise UserError("expected self-test requests with the server's settings, found none")
    return settings


def agreed_server(names: Sequence[str | None]) -> str:
    """Return the name of the server that gave all answers.

    Raises:
        UserError: an answer has no name, or another one.
    """
    found = {str(name) for name in names if name}
    if len(found) != 1 or not all(names):
        raise UserError(
            "expected all answers of the self-test from one server, found"
            f" {', '.join(sorted(found)) or 'no name'}: it was started again meanwhile, several"
            " stand behind one address, or its plug-in is of another version"
        )
    return found.pop()


def check_code(settings: dict[str, dict[str, str]], *, trust_remote_code: bool) -> None:
    """Refuse a server that runs the Python code in the model's folder where the configuration does
    not allow it, or does not run it where the configuration does.

    Args:
        settings: those of the server. They say nothing of code where the folder has none.
        trust_remote_code: the configuration's `model.trust_remote_code`.

    Raises:
        UserError: names the setting, and what the server has.
    """
    found = settings.get(_HELD, {}).get("trust_remote_code", str(trust_remote_code))
    if found != str(trust_remote_code):
        raise UserError(
            f"model.trust_remote_code: expected a server with {trust_remote_code}, found {found}:"
            " the model's folder holds Python code, which makes another model. Start the server"
            f" {'with' if trust_remote_code else 'without'} --trust-remote-code, or change the key"
        )


def check_agreement(
    settings: dict[str, dict[str, str]], *, capture_key: str, attestations: Iterable[Path]
) -> None:
    """Refuse a server whose settings differ from those of an earlier one under the same key.

    Args:
        settings: those of the server.
        attestations: files of earlier servers; missing ones are left out.

    Raises:
        UserError: names the setting, the file, and what each server has.
    """
    for path in attestations:
        earlier: dict[str, Any] = read_json(path) or {}
        if earlier.get("capture_key") == capture_key and "settings" in earlier:
            _compare(earlier["settings"], settings, origin=f"an earlier server ({path})")


def _compare(
    expected: dict[str, dict[str, str]], found: dict[str, dict[str, str]], *, origin: str
) -> None:
    one, other = expected.get(_HELD, {}), found.get(_HELD, {})
    # a setting that only one version of the engine has is no difference
    for name in sorted(one.keys() & other.keys()):
        if one[name] != other[name]:
            raise UserError(
                f"the server computes with {name} {other[name]}, but {origin} had {one[name]}, and"
                " the capture key is the same: start the server as before, or name the setting in"
                " model.engine_args, which gives a key of its own"
            )
