"""Where a server is reached."""

import dataclasses
import urllib.request
from pathlib import Path

from draftstates.errors import UserError
from draftstates.server.files import read_json, write_private


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Base URLs of the replicas, without a trailing slash, and the key that all of them ask for."""

    urls: list[str]
    api_key: str | None
    launcher: str

    def write(self, path: Path, *, generation: str) -> None:
        """Write to `path`, mode 0600. `generation` names this one start of the server."""
        write_private(path, {**dataclasses.asdict(self), "generation": generation})


def read_address(path: Path) -> Address:
    """Read an address file.

    Raises:
        UserError: there is no such file, or it is no address.
    """
    found = read_json(path)
    if found is None:
        raise UserError(f"{path}: no server's address there")
    try:
        return Address(**{field.name: found[field.name] for field in dataclasses.fields(Address)})
    except KeyError as error:
        raise UserError(f"{path}: not a server's address: {error} is missing") from error


def health(url: str, *, seconds: float) -> str | None:
    """None if the server at `url` answers `GET /health` with 200 in time, else what is wrong."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment does not lead to our own server
    try:
        with opener.open(f"{url}/health", timeout=seconds) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (OSError, ValueError) as error:
        return str(error)
