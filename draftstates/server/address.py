"""The address of a server: its file, its key, its health, and what it says of itself."""

import dataclasses
import http.client
import json
import urllib.request
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import read_json, write_private

# a proxy of the environment does not lead to our own server
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """The base URL of one server, and the key that the server asks for.

    A lease gives the address of one replica: the same server must write all rows of a file.

    Attributes:
        url: without a trailing slash.
        api_key: None for a server without a key.
        launcher: the launcher that started the server.
        server: the name that an external server gave itself when it started, from the self-test
            that it passed; None for others, whose end ends their address.
        failed: file that exists once the server has failed, of a lease; None for others.
    """

    url: str
    api_key: str | None
    launcher: str
    server: str | None = None
    failed: Path | None = None

    def write(self, path: Path) -> None:
        """Write the address to `path`, mode 0600."""
        content = dataclasses.asdict(self)
        # the run folder of the process that writes, which is no part of the address
        del content["failed"]
        write_private(path, content)


def read_address(path: Path) -> Address:
    """Read an address file.

    Raises:
        UserError: the file does not exist, or it holds no address.
    """
    found = read_json(path)
    if found is None:
        raise UserError(f"{path}: no server's address there")
    try:
        return Address(
            url=found["url"],
            api_key=found["api_key"],
            launcher=found["launcher"],
            server=found.get("server"),
        )
    except KeyError as error:
        raise UserError(f"{path}: not a server's address: {error} is missing") from error


def write_key_config(path: Path, api_key: str) -> None:
    """Write the key to a YAML file, mode 0600, that SGLang reads.

    The only other way is argv, which every user of the machine can read.
    """
    # the key of the YAML file has the spelling of the flag
    write_private(path, f"api-key: {api_key}\n")


def read_key_config(path: Path) -> str:
    """Return the key in a file that `write_key_config` wrote."""
    return path.read_text().removeprefix("api-key: ").strip()


def health(url: str, *, seconds: float) -> str | None:
    """Return None if the server answers `GET /health` with 200 in time, else the problem.

    Args:
        url: base URL of the server.
        seconds: longest time to wait.
    """
    try:
        with _DIRECT.open(f"{url}/health", timeout=seconds) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    # another program may hold the port and speak no HTTP
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def server_info(url: str, *, api_key: str | None) -> dict:
    """Return the server's own arguments and version (`GET /server_info`).

    Raises:
        UserError: no server answers, or the server is not SGLang.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # the configuration accepts http:// and https:// alone
    request = urllib.request.Request(f"{url}/server_info", headers=headers)  # noqa: S310
    try:
        with _DIRECT.open(request, timeout=60) as answer:
            info = json.loads(answer.read())
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        found = str(error) or type(error).__name__
        raise UserError(f"{url}: expected an SGLang server, found: {found}") from error
    if not isinstance(info, dict) or not isinstance(info.get("version"), str):
        found = sorted(info)[:8] if isinstance(info, dict) else repr(info)[:60]
        raise UserError(f"{url}: expected an SGLang server that reports its version, found {found}")
    return info
