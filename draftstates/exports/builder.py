"""Builder of a folder that exists whole or not at all, and that reuses files of its predecessor.

The folder is built beside its final name, in `.<name>.partial`. A ledger in that folder says what
each file holds. An interrupted export continues where it stopped. A file whose content the present
export holds, under any name, is linked and not written.
"""

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import publish, sync

LEDGER = "ledger.jsonl"
SUMMARY = "export.json"


class Builder:
    """Builder of one export, a context manager; nothing gets the final name before `finish`.

    Args:
        output: the final folder; its files are not touched before `finish`.
        identity: text that decides, together with the name of a file's content, every byte of the
            file.

    Raises:
        UserError: `output` holds something else, or another process is building it.
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
            # An earlier export was killed between the two renames of `finish`.
            self._old.rename(self.output)
        if (
            self.output.exists()
            and any(self.output.iterdir())
            and not (self.output / LEDGER).exists()
        ):
            self.__exit__()
            raise UserError(
                f"{self.output}: holds files that are not an export's: name another folder; if it"
                f" is an export that has lost its {LEDGER}, run: rm -r"
                f" {shlex.quote(str(self.output))} && snakemake --cores all"
            )
        self._done = self._read(self.partial)
        self._present = {content: name for name, content in self._read(self.output).items()}
        # The line in the ledger by file name; None for an included file.
        self._kept: dict[str, dict | None] = {}
        # `__exit__` closes it.
        self._journal = open(self.partial / LEDGER, "a" if self._done else "w")  # noqa: SIM115
        self._note({"identity": self._identity})
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_journal"):
            self._journal.close()
        os.close(self._lock)

    def add(
        self,
        name: str,
        content: str,
        write: Callable[[Path], None],
        check: Callable[[Path], None],
        *,
        check_kept: bool = False,
    ) -> None:
        """Keep, link or write file `name` with the content that `content` names, and check it.

        A new file is written with `write` and read back with `check`.

        Args:
            check_kept: read a kept or linked file back too, and write it a second time if it
                differs.

        Raises:
            UserError: the file cannot be written, or differs when it is read back.
        """
        path = self.partial / name
        if (self._done.get(name) == content or self._link(name, content)) and (
            not check_kept or _passes(check, path)
        ):
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
        self._kept[name] = {
            "name": name,
            "content": content,
            "bytes": status.st_size,
            "mtime_ns": status.st_mtime_ns,
        }
        self._note(self._kept[name])

    def include(self, *names: str) -> None:
        """Include files that the caller has written into `partial`; every export writes them."""
        for name in names:
            publish(self.partial / name, self.partial / name)
            self._kept[name] = None

    def finish(self, summary: dict | None = None) -> None:
        """Write `export.json` if there is a summary, and give the folder its final name.

        Files of earlier attempts are removed first.
        """
        lines = [{"identity": self._identity}, *(line for line in self._kept.values() if line)]
        self._write_text(LEDGER, "".join(json.dumps(line) + "\n" for line in lines))
        names = {*self._kept, LEDGER}
        if summary is not None:
            self._write_text(SUMMARY, json.dumps(summary, indent=1) + "\n")
            names.add(SUMMARY)
        for path in self.partial.rglob("*"):
            if path.is_file() and path.relative_to(self.partial).as_posix() not in names:
                path.unlink()
        if self._old.exists():
            shutil.rmtree(self._old)
        if self.output.exists():
            self.output.rename(self._old)
        self.partial.rename(self.output)
        sync(self.output.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _write_text(self, name: str, text: str) -> None:
        part = self.partial / f"{name}.part"
        part.write_text(text)
        publish(part, self.partial / name)

    def _note(self, line: dict) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def _link(self, name: str, content: str) -> bool:
        """Link the earlier export's file with this content; return False where there is none."""
        source = self._present.get(content)
        if source is None:
            return False
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            os.link(self.output / source, path)
        # The file system has no hard links.
        except OSError:
            shutil.copy2(self.output / source, path)
        return True

    def _read(self, folder: Path) -> dict[str, str]:
        """Return the content of each file, by name, that lies in `folder` as its ledger says.

        The result is empty if the folder was built with another identity.
        """
        try:
            with open(folder / LEDGER) as file:
                lines = [json.loads(line) for line in file if line.endswith("\n")]
        except (OSError, ValueError):
            return {}
        if not lines or lines[0] != {"identity": self._identity}:
            return {}
        last = {line["name"]: line for line in lines if "name" in line}
        return {
            name: line["content"] for name, line in last.items() if _unchanged(folder / name, line)
        }


def _passes(check: Callable[[Path], None], path: Path) -> bool:
    try:
        check(path)
    except UserError:
        return False
    return True


def _unchanged(path: Path, line: dict) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (line["bytes"], line["mtime_ns"])
