"""The damage matrix: each kind of file of a finished results tree is damaged in every way, and the
table says who noticed it.

    python tests/campaign/damage.py --folder /tmp/damage [--kinds plan shard] [--damages emptied]
    python tests/campaign/damage.py --folder /tmp/damage --compact

After each damage, `snakemake` runs, then `ShardDataset` reads every sample without and with
`verify`, then the job that reads the file next is forced. A damage must be noticed with the file's
name and a command that mends it, which is tried; or leave every sample as it was, for the reason in
`HARMLESS`. The script ends with status 1 if one of them is neither, or if a file of the tree is of
no kind. No server runs; one case takes some two seconds of a core.
"""

import argparse
import dataclasses
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from finished import Finished, equal, find_finished, make_finished, read_all  # noqa: E402
from preloaded import preloaded  # noqa: E402

from draftstates.errors import UserError  # noqa: E402

# kind of file: pattern below the results folder, and the output that the next reader makes
KINDS = {
    "tokens": ("tokens/*.parquet", "plan"),
    "accounting": ("tokens/*.json", "plan"),
    "plan": ("plan.json", None),
    "shard tokens": ("tokens/shards/*.parquet", "manifest"),
    "server": ("*/server.json", None),
    "self-test rows": ("*/selftest.safetensors", None),
    "parity": ("*/parity.json", "manifest"),
    "parity page": ("*/parity.html", None),
    "recaptures": ("*/shards/*.recaptures.safetensors", "verified"),
    "receipts": ("*/shards/*.receipts.json", "verified"),
    "shard": ("*/shards/*[0-9a-f].safetensors", "verified"),
    "compact form": ("*/compact/*/*.safetensors", "manifest"),
    "its record": ("*/compact/*/*.json", "manifest"),
    "verified": ("*/verified/*.json", "manifest"),
    "manifest": ("*/manifest.json", "export"),
    "samples": ("*/samples.parquet", "export"),
    "export": ("*/exports/*/export.json", "export"),
    "ledger": ("*/exports/*/ledger.jsonl", "export"),
    "exported": ("*/exports/*/rows_*/*", "export"),
    "vocabulary of an export": ("*/exports/*/vocab_mapping.pt", "export"),
    "vocabulary": ("vocabulary/*/*", None),
    "page": ("report/*", None),
    "configuration": ("config/*.yaml", None),
    "lock": (".run.lock", None),
    "log": ("logs/**/*.log", None),
    "benchmark": ("benchmarks/**/*.tsv", None),
}
# kinds of a tree whose shards are stored in a compact form
_COMPACT = ("compact form", "its record")
OF_COMPACT = (*_COMPACT, "verified", "manifest", "samples")
AS_CAPTURED = tuple(kind for kind in KINDS if kind not in _COMPACT)
_RECORD = "no job and no trainer reads it: it is for people"
HARMLESS = {
    "log": _RECORD,
    "benchmark": "the report alone reads it, for its figures of time",
    "page": _RECORD,
    "parity page": _RECORD,
    "server": "a new server compares its settings with it; trainers read the manifest",
    "self-test rows": "a new server, and parity, read it and refuse it by name",
    "vocabulary": "docs/failures.md: no run reads it a second time; its trainer does",
    "configuration": "every run writes it a second time",
    "lock": "its content is only shown; the lock is the kernel's",
    "tokens": "what was captured is in the shards; the next plan reads and checks it",
    "accounting": "what was captured is in the manifest; the next plan reads and checks it",
    "shard tokens": "what was captured is in the shards; the next manifest reads and checks it",
    "parity": "the manifest holds it; the next manifest reads and checks it",
    "recaptures": "the shard was verified; trainers read the shard",
    "receipts": "the shard was verified; trainers read the shard",
    "verified": "the manifest has what it says; the next manifest reads and checks it",
    "shard": "docs/failures.md: a second run does not read shards, and verify=True does",
    "compact form": "docs/failures.md: a second run does not read shards, and verify=True does",
    "its record": "the manifest has what it says; the next manifest reads and checks it",
    "export": "an export writes it a second time",
    "ledger": "an export that cannot read it writes every file a second time",
    "exported": "docs/failures.md: no run reads an export's files; its trainer does",
    "vocabulary of an export": "docs/failures.md: no run reads an export's files; its trainer does",
}
# the content is whole
UNCHANGED = "the content is as it was"

Damage = Callable[[Path, Path | None], None]


def flip(place: float) -> Damage:
    """Return a damage that flips one bit, as a disk does: size and time stay."""

    def damage(path: Path, other: Path | None) -> None:
        before, data = path.stat(), bytearray(path.read_bytes())
        if data:
            data[min(int(len(data) * place), len(data) - 1)] ^= 4
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return damage


def truncate(path: Path, other: Path | None) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, other: Path | None) -> None:
    os.truncate(path, 0)


def replace(path: Path, other: Path | None) -> None:
    if other:
        shutil.copyfile(other, path)


def delete(path: Path, other: Path | None) -> None:
    path.unlink()


def date(seconds: float) -> Damage:
    def damage(path: Path, other: Path | None) -> None:
        os.utime(path, (time.time() + seconds,) * 2)

    return damage


DAMAGES: dict[str, Damage] = {
    "truncated": truncate,
    "emptied": empty,
    "bit in the head": flip(0.02),
    "bit in the middle": flip(0.5),
    "bit at the end": flip(1.0),
    "another's": replace,
    "deleted": delete,
    "dated back": date(-86400),
    "dated ahead": date(86400),
}
_REMEDY = re.compile(r"(?:run|again|shard|made): ((?:rm|touch|find|snakemake) .+)$", re.MULTILINE)


@dataclasses.dataclass
class Outcome:
    """What was noticed of one damage: who noticed it, and how it said so."""

    kind: str
    damage: str
    noticed: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        said = "; ".join(self.noticed) or f"harmless: {self.reason()}"
        return f"{self.kind:13} {self.damage:18} " + (
            f"WRONG: {'; '.join(self.wrong)}; {said}" if self.wrong else said
        )

    def reason(self) -> str:
        unchanged = self.damage.startswith("dated")
        return UNCHANGED if unchanged else HARMLESS.get(self.kind, "")


def files_of(results: Path, kind: str) -> list[Path]:
    """Return the files of a kind; one without content cannot be damaged."""
    files = [path for path in results.glob(KINDS[kind][0]) if path.is_file()]
    return sorted(path for path in files if kind != "shard" or ".recaptures" not in path.name)


def unnamed(results: Path) -> list[Path]:
    """Return the files of a tree that are of no kind."""
    named = {path for kind in KINDS for path in files_of(results, kind)}
    return sorted(path for path in results.rglob("*") if path.is_file() and path not in named)


def cases(
    results: Path, kinds: list[str], damages: list[str]
) -> Iterator[tuple[str, str, Path, Path | None]]:
    """Yield kind, damage, the file to damage, and another file of the kind."""
    for kind in kinds:
        files = files_of(results, kind)
        assert files, f"the tree has no {kind}"
        for damage in damages:
            if damage != "another's" or len(files) > 1:
                yield kind, damage, files[0], files[1] if len(files) > 1 else None


def try_damage(
    finished: Finished, folder: Path, kind: str, damage: str, path: Path, other: Path | None
) -> Outcome:
    """Damage one file in a copy of the tree, and look who notices it.

    Args:
        finished: the whole tree.
        folder: folder of the copy, which is made and removed.
        path: the file to damage, in the whole tree.
        other: another file of its kind.
    """
    copy = dataclasses.replace(finished, workspace=finished.workspace.copy_to(folder))
    try:
        damaged = folder / path.relative_to(finished.workspace.folder)
        outcome = Outcome(kind, damage)
        # published files have no write bits, which stop no disk and no root
        damaged.chmod(0o644)
        DAMAGES[damage](damaged, other)
        _run(copy, outcome, damaged)
        for verify in (False, True):
            _read(copy, outcome, damaged, verify=verify)
        if not outcome.noticed and not damage.startswith("dated"):
            _force_next_reader(copy, outcome, damaged)
        if not outcome.noticed and not outcome.reason():
            outcome.wrong.append("not noticed, and no reason is stated")
        return outcome
    finally:
        shutil.rmtree(folder)


def _run(copy: Finished, outcome: Outcome, damaged: Path, *flags: str) -> None:
    """Run Snakemake; where it refuses, run what it says, and then it must succeed."""
    before = damaged.read_bytes() if damaged.exists() else None
    # a file dated in the future may stop more than one rule
    for _ in range(3):
        done = copy.workspace.snakemake(*flags)
        if "Traceback" in done.stdout:
            outcome.wrong.append(f"traceback: {done.stdout[-2000:]}")
        if done.returncode == 0:
            if (damaged.read_bytes() if damaged.exists() else None) != before:
                outcome.noticed.append("snakemake made it again")
            return
        lines = [line for line in done.stdout.splitlines() if _names(outcome, damaged, line)]
        remedies = _REMEDY.findall(done.stdout)
        outcome.noticed.append(f"snakemake: {_first(lines)}")
        if not lines or not remedies:
            outcome.wrong.append(f"no name or no remedy: {done.stdout[-2000:]}")
            return
        # what stands after the command on its line is prose
        copy.workspace.shell(remedies[-1].split(", then")[0])
        flags = ()
    outcome.wrong.append(f"what the message says does not help: {done.stdout[-2000:]}")


def _names(outcome: Outcome, damaged: Path, text: str) -> bool:
    """Return whether a text names the damaged file; the files of a shard go by its id."""
    if outcome.kind in ("shard", "recaptures", "receipts", *_COMPACT):
        return damaged.name.split(".")[0] in text
    return damaged.name in text


def _first(lines: list[str]) -> str:
    errors = [line for line in lines if "expected" in line or "error" in line] or lines
    return errors[-1].strip()[:160] if errors else "no line names the file"


def _read(copy: Finished, outcome: Outcome, damaged: Path, *, verify: bool) -> None:
    """Read every sample; a reader either refuses with a remedy, or finds what was captured."""
    who = "ShardDataset with verify" if verify else "ShardDataset"
    try:
        same = equal(read_all(copy.capture.manifest, verify=verify), copy.samples)
    except UserError as error:
        outcome.noticed.append(f"{who}: {str(error)[:160]}")
        if not _names(outcome, damaged, str(error)):
            outcome.wrong.append(f"{who} does not name the file: {error}")
        if not _REMEDY.search(str(error)):
            outcome.wrong.append(f"{who} names no remedy: {error}")
    except Exception as error:
        outcome.wrong.append(f"{who}: {type(error).__name__}: {error}")
    else:
        if not same and (verify or outcome.kind not in ("shard", "compact form")):
            outcome.wrong.append(f"{who} gives other samples")


def _force_next_reader(copy: Finished, outcome: Outcome, damaged: Path) -> None:
    """Force the job that reads the file next."""
    wanted = KINDS[outcome.kind][1]
    if not wanted:
        return
    target = {
        "plan": copy.results.plan,
        "manifest": copy.capture.manifest,
        "verified": copy.capture.verified(damaged.name.split(".")[0]),
        "export": copy.capture.export("specforge"),
    }[wanted]
    name = target.relative_to(copy.workspace.folder)
    _run(copy, outcome, damaged, "--forcerun", str(name))
    _read(copy, outcome, damaged, verify=True)


def main() -> None:
    """Try the cases, print the table, and end with status 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="the tree is made or found here")
    parser.add_argument("--compact", action="store_true", help="a tree with compact shards")
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--damages", nargs="+", choices=DAMAGES, default=list(DAMAGES))
    arguments = parser.parse_args()
    whole = arguments.folder / ("compact" if arguments.compact else "whole")
    changes = {"storage": {"format": "e4m3"}} if arguments.compact else {}
    usual = OF_COMPACT if arguments.compact else AS_CAPTURED
    with preloaded():
        finished = (
            find_finished(whole)
            if whole.exists()
            else make_finished(
                whole, rows=3, exports={"specforge": {}}, draft_vocab_size=64, **changes
            )
        )
        results = finished.workspace.results
        wrong = len(others := unnamed(results))
        for path in others:
            print(f"WRONG: {path.relative_to(results)}: a file of no kind")
        for number, case in enumerate(cases(results, arguments.kinds or usual, arguments.damages)):
            outcome = try_damage(finished, arguments.folder / f"copy{number}", *case)
            print(outcome, flush=True)
            wrong += bool(outcome.wrong)
    print(f"{wrong} cases are wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
