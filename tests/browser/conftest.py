"""A browser that opens a page from its file and says what a script finds in it."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WATCH = """<script>
window.faults = [];
window.addEventListener("error", (event) => window.faults.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => window.faults.push(String(event.reason)));
</script>"""
ASK = """<script>
const say = (found) => {
  const place = document.createElement("pre");
  place.id = "found";
  place.textContent = encodeURIComponent(JSON.stringify({ ...found, faults: window.faults }));
  document.body.append(place);
};
window.drawn.catch(() => {}).then(() => { %s }).then(say, (error) => say({ error: String(error) }));
</script>"""
FOUND = re.compile(r'<pre id="found">([^<]*)</pre>')
SECONDS = 60

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Return a function that opens a page and returns what a script returns in it.

    Its arguments are the page, the body of a function in JavaScript, and whether the browser's
    colours are dark. `faults` in its result are the errors of all scripts. The browser has no
    network.
    """
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser: expected one of {', '.join(NAMES)}; run: make system-packages")
    profile = tmp_path_factory.mktemp("browser")

    def asked(page: Path, script: str, *, dark: bool = False) -> dict[str, Any]:
        text = page.read_text(encoding="utf-8")
        head, rest = text.split("<head>", 1)
        watched = f"{head}<head>{WATCH}{rest}" + ASK % script
        copy = page.with_name(f"asked-{page.name}")
        copy.write_text(watched, encoding="utf-8")
        command = [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--window-size=1280,900",
            "--virtual-time-budget=30000",
            "--dump-dom",
            copy.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        found = FOUND.search(done.stdout)
        assert found, f"the page did not come to its end:\n{done.stderr[-2000:]}"
        return json.loads(unquote(found[1]))

    return asked
