"""Picture of a report's first part, as the README shows it.

After the demo: python tests/browser/picture.py results/report/index.html docs/report.png
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

page, picture = map(Path, sys.argv[1:])
with sync_playwright() as driver:
    browser = driver.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    shown = browser.new_page(viewport={"width": 960, "height": 1390}, color_scheme="light")
    shown.goto(page.absolute().as_uri())
    shown.evaluate("window.drawn")
    shown.screenshot(path=picture)
    browser.close()
