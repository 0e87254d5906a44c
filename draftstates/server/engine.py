"""The report of a running SGLang server about itself."""

import http.client
import json
import urllib.request

from draftstates.errors import UserError


def server_info(url: str, *, api_key: str | None) -> dict:
    """Return the server's own arguments and version (`GET /server_info`).

    Raises:
        UserError: no server answers, or the server is not SGLang.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # the configuration accepts http:// and https:// alone
    request = urllib.request.Request(f"{url}/server_info", headers=headers)  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            info = json.loads(answer.read())
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        found = str(error) or type(error).__name__
        raise UserError(f"{url}: expected an SGLang server, found: {found}") from error
    if not isinstance(info, dict) or not isinstance(info.get("version"), str):
        found = sorted(info)[:8] if isinstance(info, dict) else repr(info)[:60]
        raise UserError(f"{url}: expected an SGLang server that reports its version, found {found}")
    return info
