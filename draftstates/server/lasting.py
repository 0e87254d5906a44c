"""Lasting failures of a server: those that a second start meets again.

An engine that refuses its arguments or the model, and a self-test that refuses the server, end in
the same way every time. A server that was killed, ran out of memory, waited too long or found its
port in use may start the next time.
"""

import dataclasses
import re

from draftstates.errors import NO_SECOND_ATTEMPT

# argparse's, and the shell's for commands that cannot be started
_REFUSED = frozenset({2, 126, 127})
# what the plug-in prints before it ends the engine
_PLUGIN = "draftstates: cannot capture with sglang"
# exceptions about what the engine was given; a RuntimeError may be about the state of a device
_ABOUT_INPUT = re.compile(
    r"(?:Assertion|Attribute|FileNotFound|Import|Index|Key|ModuleNotFound|Name|NotADirectory"
    r"|NotImplemented|Recursion|Safetensor|Syntax|Type|UnicodeDecode|User|Validation|Value)Error"
)
_PASSING = re.compile(
    r"out ?of ?memory|cannot allocate|memoryerror|address already in use|timed? ?out|connection"
    r"|broken pipe|no space left|input/output error|stale file handle|cuda error|nccl"
    r"|killed|temporarily",
    re.IGNORECASE,
)
# the last line of a traceback; SGLang's loggers put nothing before it
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Timeout))\b(?:: .*)?$", re.MULTILINE)
_CAUSE_OF_ANOTHER = re.compile(
    r"\n\n(?:During handling of the above exception|The above exception was the direct cause)"
)


def refused_by_engine(code: int, log: str) -> bool:
    """Return whether an engine that ended before it was ready will end so at every start.

    Args:
        code: exit code of the engine, or minus the signal that ended it. An engine ends itself by a
            signal after an exception in one of its processes.
        log: what the engine wrote.
    """
    if code in _REFUSED or _PLUGIN in log:
        return True
    lines, names = [], set()
    for found in _EXCEPTION.finditer(log):
        if not _CAUSE_OF_ANOTHER.match(log, found.end()):
            lines.append(found[0])
            names.add(found[1])
    return any(map(_ABOUT_INPUT.fullmatch, names)) and not any(map(_PASSING.search, lines))


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a server; every client that waits for the server or uses it gets its text.

    Attributes:
        error: the failure in words.
        lasting: whether every start would end in the same way.
    """

    error: str
    lasting: bool = False

    def without(self, api_key: str | None) -> "Failure":
        """Return the failure without the server's key in its text."""
        if not api_key:
            return self
        return Failure(self.error.replace(api_key, "<api key>"), self.lasting)

    def for_clients(self) -> str:
        """Return the text for the clients, which says whether another server will be started."""
        return f"{self.error}\n{NO_SECOND_ATTEMPT}" if self.lasting else self.error
