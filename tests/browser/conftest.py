"""A browser that opens a page from its file, without a network."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A page in the browser.

    Attributes:
        page: the page, whose charts are drawn.
        faults: errors of all scripts.
        outside: addresses of all that was asked for, beside the page itself.
    """

    page: Page
    faults: list[str]
    outside: list[str]


# Only for a module: while it runs, other tests in this process could not run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: expected one of {', '.join(NAMES)}; run: make system-packages")
    with sync_playwright() as driver:
        # root has no sandbox
        started = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def show(browser: Browser) -> Iterator[Callable[..., Shown]]:
    """Return a function that opens a page.

    Its arguments are the page's file, the window's width, and further options of a context of
    Playwright, such as `color_scheme`.
    """
    contexts = []

    def open_page(path: Path, *, width: int = 1280, **options: Any) -> Shown:
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, offline=True, **options)
        contexts.append(context)
        shown = Shown(context.new_page(), [], [])
        shown.page.on("pageerror", lambda error: shown.faults.append(str(error)))
        shown.page.on("request", lambda request: shown.outside.append(request.url))
        shown.page.goto(path.as_uri())
        shown.outside.remove(path.as_uri())
        if options.get("java_script_enabled", True):
            shown.page.evaluate("window.drawn.catch(() => {})")
        return shown

    yield open_page
    for context in contexts:
        context.close()
