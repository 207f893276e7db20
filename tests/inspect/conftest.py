"""A real browser without a network. Tests that need it are skipped if Chromium is not installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgk.inspect import Page, page
from tests.inspect.browser import SIZE, settle
from tests.inspect.common import attention

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    found = os.environ.get("MGK_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("Chromium not found; install it, or set MGK_CHROMIUM to its path")
    with api.sync_playwright() as playwright:
        # In a container there is no sandbox, and /dev/shm is small.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a page from disk, offline. Errors and warnings of the browser fail the test."""
    problems: list[str] = []
    contexts = []

    def opened(
        page: Page, *, at: str = "", script: str = "", width: int = 1280, height: int = 900, **options: Any
    ) -> Any:
        path = page.write(tmp_path / "page.html")
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20_000)
        tab.on("console", lambda message: problems.append(message.text) if is_problem(message) else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        if script:
            tab.add_init_script(script)
        tab.goto(f"file://{path}{at}")
        if page.html.count('class="map"') or '"layers":[' in page.html:
            settle(tab)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not problems


def is_problem(message: Any) -> bool:
    """Whether a message is an error or a warning, except one caused by the tests reading pixels."""
    return message.type in ("error", "warning") and "willReadFrequently" not in message.text


@pytest.fixture(scope="session")
def two() -> Page:
    """A page of two models."""
    return page([attention("softmax", 4, SIZE), attention("smgk", 2, SIZE)])
