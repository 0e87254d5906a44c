"""Stands in for `scripts/report_page.py`: an empty page."""

import sys
from pathlib import Path

Path(sys.argv[sys.argv.index("--output") + 1]).touch()
