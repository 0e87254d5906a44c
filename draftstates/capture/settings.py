"""Settings that a server is started with, in one environment variable.

All processes of the server see the same settings.
"""

import dataclasses
import json
import os
from pathlib import Path

from draftstates.spec import CaptureSpec

ENVIRONMENT = "DRAFTSTATES_CAPTURE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """Settings of the plug-in.

    Attributes:
        root: the folder below which the server writes; it writes nowhere else.
        spec: the capture and its target model; the server refuses files that are laid out for
            another capture.
        queue_bytes: host memory for rows on their way to the disk; the scheduler waits while it is
            full.
        block_bytes: size of one block of that memory.
        writers: number of threads that write.
    """

    root: Path
    spec: CaptureSpec
    queue_bytes: int = 2 << 30
    block_bytes: int = 64 << 20
    writers: int = 8

    def to_environment(self) -> dict[str, str]:
        """Return the variable that hands the settings to a server."""
        return {ENVIRONMENT: json.dumps({**dataclasses.asdict(self), "root": str(self.root)})}

    @classmethod
    def from_environment(cls) -> "CaptureSettings | None":
        """Read the settings; return None if the server was not started for capture."""
        text = os.environ.get(ENVIRONMENT)
        if not text:
            return None
        values = json.loads(text)
        return cls(
            **{
                **values,
                "root": Path(values["root"]).resolve(),
                "spec": CaptureSpec(**values["spec"]),
            }
        )
