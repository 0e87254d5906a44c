"""Where a server is reached."""

import dataclasses
import urllib.request
from pathlib import Path

from draftstates.errors import UserError
from draftstates.server.files import read_json, write_private


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Base URL of one server, without a trailing slash, and the key that it asks for.

    Of several replicas a lease gives one: all rows of a file must be written by the same server.
    """

    url: str
    api_key: str | None
    launcher: str

    def write(self, path: Path) -> None:
        """Write to `path`, mode 0600."""
        write_private(path, dataclasses.asdict(self))


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


def write_key_config(path: Path, api_key: str) -> None:
    """Write the key to a YAML file, mode 0600, that SGLang reads: the only other way is argv, which every user of the machine sees."""
    write_private(path, f"api-key: {api_key}\n")  # spelt as the flag


def read_key_config(path: Path) -> str:
    """The key in a file of `write_key_config`."""
    return path.read_text().removeprefix("api-key: ").strip()


def health(url: str, *, seconds: float) -> str | None:
    """None if the server at `url` answers `GET /health` with 200 in time, else what is wrong."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment does not lead to our own server
    try:
        with opener.open(f"{url}/health", timeout=seconds) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (OSError, ValueError) as error:
        return str(error)
