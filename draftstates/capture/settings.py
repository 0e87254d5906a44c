"""What a server is started with, in one environment variable, so that every process of it sees the same."""

import dataclasses
import json
import os
from pathlib import Path

from draftstates.capture_spec import CaptureSpec

ENVIRONMENT = "DRAFTSTATES_CAPTURE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """Settings of the plug-in.

    Attributes:
        root: the server writes only below this folder.
        spec: what the server captures, of which model: files that are laid out for anything else it refuses.
        queue_bytes: host memory for rows on their way to the disk; when it is full the scheduler waits.
        block_bytes: size of one block of that memory.
        writers: threads that write.
    """

    root: Path
    spec: CaptureSpec
    queue_bytes: int = 2 << 30
    block_bytes: int = 64 << 20
    writers: int = 8

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT: json.dumps({**dataclasses.asdict(self), "root": str(self.root)})}

    @classmethod
    def from_environment(cls) -> "CaptureSettings | None":
        """The settings, or None where this server was not started by us."""
        text = os.environ.get(ENVIRONMENT)
        if not text:
            return None
        values = json.loads(text)
        return cls(**{**values, "root": Path(values["root"]).resolve(), "spec": CaptureSpec(**values["spec"])})
