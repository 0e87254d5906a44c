"""Export a manifest for one trainer, by the code of `draftstates export`."""

import sys

from draftstates.commands.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
