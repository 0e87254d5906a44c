"""Examination before a capture: of a running SGLang server, or of this machine.

With --url, it sends six prompts to the server, ours or not, and says whether the radix cache,
chunked prefill or the warm-up would corrupt a capture there, what to change, and how certain that
is. Nothing on the server changes, but its cache holds the prompts for a while.

Without --url, it holds this machine to a configuration and says what will be the limit, and how
long the capture takes.

Exit status: 0 if nothing was found; 3 if a capture would be corrupted or does not fit, or if what a
server does cannot be told; 1 for errors.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from draftstates import config
from draftstates.commands import add_json, print_json
from draftstates.errors import UserError
from draftstates.report import doctor_machine, doctor_requests, doctor_server, machine

EXAMPLE = "draftstates doctor --url http://127.0.0.1:30000"
# argparse and lasting errors have 2
FOUND_STATUS = 3
_CERTAINTY = {
    "measured": "measured",
    "cached tokens": "follows from the cached tokens",
    "flags": "by the server's flags alone",
    "none": "not known",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="examine the SGLang server at this address")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file that holds the server's key"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="results folder of a server with the plug-in, which then counts the rows itself",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("config.yaml"),
        help="without --url: the configuration to compare this machine with",
    )
    add_json(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print what was found; exit with status 3 if that is anything."""
    if arguments.url:
        document, text, fine = _server(arguments)
    else:
        document, text, fine = _machine(arguments)
    if arguments.json:
        print_json(document)
    else:
        print(text)
    if not fine:
        sys.exit(FOUND_STATUS)


def _server(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, bool]:
    url: str = arguments.url
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--url: expected http://HOST:PORT, found {url!r}")
    key = arguments.api_key_file and arguments.api_key_file.read_text().strip()
    examined = doctor_server.examine(url.rstrip("/"), api_key=key, results=arguments.results)
    fine = all(finding.verdict == "harmless" for finding in examined.findings)
    return dataclasses.asdict(examined), server_text(examined), fine


def server_text(examined: doctor_server.Examination) -> str:
    """Return an examination in plain sentences."""
    lines = [
        f"{examined.url}: {examined.engine}, {examined.model}",
        doctor_requests.COUNTED[examined.counted],
        "",
        f"{'prompt':<24}{'sent':>8}{'cached':>8}{'rows back':>11}",
    ]
    for seen in examined.seen:
        cached = "?" if seen.cached is None else f"{seen.cached:,}"
        rows = "-" if seen.rows is None else f"{seen.rows:,}"
        lines.append(f"{seen.name:<24}{seen.sent:>8,}{cached:>8}{rows:>11}")
    for finding in examined.findings:
        certainty = _CERTAINTY[finding.certainty]
        said = "WOULD CORRUPT A CAPTURE" if finding.verdict == "corrupts" else finding.verdict
        lines += ["", f"{finding.subject}: {said} ({certainty})", f"  {finding.why}"]
        lines += [f"  To change it: {finding.change}."] if finding.change else []
    return "\n".join(lines)


def _machine(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, bool]:
    configured = config.load(arguments.config)
    work, found = doctor_machine.asked(configured), machine.look(configured.results)
    checks = doctor_machine.compare(found, configured, work)
    forecast = doctor_machine.forecast(found, configured, work, checks)
    document = {
        "config": str(arguments.config),
        "checks": [dataclasses.asdict(check) for check in checks],
        **dataclasses.asdict(forecast),
    }
    fine = all(check.verdict != "short" for check in checks)
    return document, machine_text(checks, forecast), fine


def machine_text(checks: list[doctor_machine.Check], forecast: doctor_machine.Forecast) -> str:
    """Return the comparison of a machine, one resource a line, and what will be the limit."""
    lines = []
    for check in checks:
        lines.append(f"{check.name:<12}{check.verdict:<9}{check.found}; needed: {check.needed}")
        lines += [f"{'':<21}To change it: {check.change}."] if check.change else []
    return "\n".join([*lines, "", forecast.limit])
