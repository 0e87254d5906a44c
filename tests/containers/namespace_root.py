"""Runner of a command as root of a user namespace: `namespace_root.py COMMAND...`.

Every id is itself in the namespace. Apptainer's builds ask for all capabilities. A virtual
machine's root may lack one; root of a namespace has all.
"""

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000


def main() -> None:
    ready, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER):
            os._exit(1)
        os.write(ready[1], b"x")
        os.read(mapped[0], 1)
        os.execvp(sys.argv[1], sys.argv[1:])
    os.close(ready[1])
    if os.read(ready[0], 1):
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("0 0 65536")
    os.write(mapped[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
