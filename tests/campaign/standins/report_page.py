"""Stands in for `scripts/report_page.py`: a page that says nothing."""

import sys
from pathlib import Path

Path(sys.argv[sys.argv.index("--output") + 1]).write_text("<p>a report</p>")
