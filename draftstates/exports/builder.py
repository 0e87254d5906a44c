"""A folder of files that exists whole or not at all, and takes over from its predecessor what has not changed.

It is built beside its final name in `.<name>.partial`. A ledger there tells what each file holds: an interrupted export goes on where it
stopped, and a file whose content the present export has already, under whatever name, is linked instead of written.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from draftstates.building import publish, sync_folder
from draftstates.errors import UserError

LEDGER = "ledger.jsonl"
SUMMARY = "export.json"


class Builder:
    """Builds one export. Use as a context manager; nothing gets the final name before `finish`.

    Args:
        output: the final folder; its files are not touched before `finish`.
        identity: text that decides, together with a file's content name, every byte of it.

    Raises:
        UserError: `output` holds something else, or another process builds it right now.
    """

    def __init__(self, output: Path, *, identity: str) -> None:
        self.output = Path(output)
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self._old = self.output.with_name(f".{self.output.name}.old")
        self._identity = identity
        self.written = self.reused = 0

    def __enter__(self) -> "Builder":
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(f"{self.output}: another export is being written there") from None
        if self._old.exists() and not self.output.exists():
            self._old.rename(self.output)  # killed between the two renames of `finish`
        if self.output.exists() and any(self.output.iterdir()) and not (self.output / LEDGER).exists():
            self.__exit__()
            raise UserError(f"{self.output}: holds files that are not an export's: name another folder")
        self._done = self._read(self.partial)
        self._present = {content: name for name, content in self._read(self.output).items()}
        self._kept: dict[str, dict | None] = {}  # file name to its line in the ledger, where it has one
        self._journal = open(self.partial / LEDGER, "a" if self._done else "w")  # noqa: SIM115 (closed in __exit__)
        self._note({"identity": self._identity})
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_journal"):
            self._journal.close()
        os.close(self._lock)

    def add(self, name: str, content: str, write: Callable[[Path], None], check: Callable[[Path], None]) -> None:
        """Have file `name` with what `content` names: kept, linked, or written with `write`, then read back with `check`.

        Raises:
            UserError: the file cannot be written, or reads back as something else.
        """
        path = self.partial / name
        if self._done.get(name) == content or self._link(name, content):
            self.reused += 1
        else:
            part = path.with_name(f"{path.name}.part")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(part)
                check(part)
                publish(part, path)
            except OSError as error:
                raise UserError(f"{path}: cannot be written: {error.strerror}") from error
            self.written += 1
        status = path.stat()
        self._kept[name] = {"name": name, "content": content, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        self._note(self._kept[name])

    def include(self, *names: str) -> None:
        """Take in files that the caller has written into `partial` itself; they are written again by every export."""
        for name in names:
            publish(self.partial / name, self.partial / name)
            self._kept[name] = None

    def finish(self, summary: dict) -> None:
        """Write `export.json`, remove what is left of other attempts, and give the folder its final name."""
        lines = [{"identity": self._identity}, *(line for line in self._kept.values() if line)]
        self._write_text(LEDGER, "".join(json.dumps(line) + "\n" for line in lines))
        self._write_text(SUMMARY, json.dumps(summary, indent=1) + "\n")
        for path in self.partial.rglob("*"):
            if path.is_file() and path.relative_to(self.partial).as_posix() not in {*self._kept, LEDGER, SUMMARY}:
                path.unlink()
        if self._old.exists():
            shutil.rmtree(self._old)
        if self.output.exists():
            self.output.rename(self._old)
        self.partial.rename(self.output)
        sync_folder(self.output.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _write_text(self, name: str, text: str) -> None:
        part = self.partial / f"{name}.part"
        part.write_text(text)
        publish(part, self.partial / name)

    def _note(self, line: dict) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def _link(self, name: str, content: str) -> bool:
        source = self._present.get(content)
        if source is None:
            return False
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            os.link(self.output / source, path)
        except OSError:  # a file system without hard links
            shutil.copy2(self.output / source, path)
        return True

    def _read(self, folder: Path) -> dict[str, str]:
        """Name to content, of the files that lie in `folder` as its ledger says; none where it was built with another identity."""
        try:
            with open(folder / LEDGER) as file:
                lines = [json.loads(line) for line in file if line.endswith("\n")]
        except (OSError, ValueError):
            return {}
        if not lines or lines[0] != {"identity": self._identity}:
            return {}
        last = {line["name"]: line for line in lines if "name" in line}
        return {name: line["content"] for name, line in last.items() if _unchanged(folder / name, line)}


def _unchanged(path: Path, line: dict) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (line["bytes"], line["mtime_ns"])
