"""The report of a running SGLang server about itself."""

import json
import urllib.error
import urllib.request

from draftstates.errors import UserError


def server_info(url: str, *, api_key: str | None) -> dict:
    """Return the server's own arguments and version (`GET /server_info`).

    Raises:
        UserError: no server answers, or the server is not SGLang.
    """
    request = urllib.request.Request(
        f"{url}/server_info", headers={"Authorization": f"Bearer {api_key}"} if api_key else {}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            info = json.loads(answer.read())
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise UserError(f"{url}: expected an SGLang server, found: {error}") from error
    if "version" not in info:
        raise UserError(
            f"{url}: expected an SGLang server that reports its version, found {sorted(info)[:8]}"
        )
    return info
