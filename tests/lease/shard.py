"""A small extracting job: it takes a lease, works, asks the server, and writes its output."""

import argparse
import time
import urllib.request
from pathlib import Path

from draftstates import errors
from draftstates.errors import UserError
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--fail", required=True, help="name of the one output that cannot be made")
    args = parser.parse_args()
    with lease(ServerSettings.from_json(Path("settings.json").read_text())) as address:
        print(f"leased for {args.output}", flush=True)
        time.sleep(args.seconds)
        if args.output.stem == args.fail:
            raise UserError(f"{args.output}: planted")
        request = urllib.request.Request(
            address.url, headers={"Authorization": f"Bearer {address.api_key}"}
        )
        args.output.write_bytes(urllib.request.urlopen(request, timeout=10).read())


errors.run_command(main)
