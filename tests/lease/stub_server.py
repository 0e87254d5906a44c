"""A stub of a leased server: healthy after a delay, guarded by its key, able to misbehave."""

import argparse
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--starts", type=Path, required=True, help="gets a line with the pid at each start"
    )
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument(
        "--stubborn", action="store_true", help="ignore TERM, INT and HUP, and so do the helpers"
    )
    parser.add_argument(
        "--helpers", type=int, default=0, help="children, each in a session of its own"
    )
    parser.add_argument(
        "--break", dest="broken", action="store_true", help="write a lot, then exit with status 3"
    )
    parser.add_argument("--last-words", default="", help="write this, and end before it is ready")
    parser.add_argument(
        "--end-with", type=int, default=1, help="exit status of that end, or minus a signal"
    )
    return parser.parse_args()


class Handler(http.server.BaseHTTPRequestHandler):
    key = ""

    def do_GET(self) -> None:
        allowed = (
            self.path == "/health" or self.headers.get("Authorization") == f"Bearer {self.key}"
        )
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if allowed:
            self.wfile.write(
                json.dumps(
                    {
                        "pid": os.getpid(),
                        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
                        "fds": open_files(),
                    }
                ).encode()
            )

    def log_message(self, *_: object) -> None:
        pass


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        # closed by another thread in between
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def main() -> None:
    args = arguments()
    if args.stubborn:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    with open(args.starts, "a") as file:
        file.write(f"{os.getpid()}\n")
    if args.broken:
        print(*(f"line {i}" for i in range(100)), sep="\n")
        print("no such model", args.config.read_text(), flush=True)
        sys.exit(3)
    if args.last_words:
        print(args.last_words, flush=True)
        if args.end_with < 0:
            os.kill(os.getpid(), -args.end_with)
        sys.exit(args.end_with)
    for _ in range(args.helpers):
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
    time.sleep(args.delay)
    Handler.key = args.config.read_text().removeprefix("api-key: ").strip()
    print("ready", flush=True)
    http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


main()
