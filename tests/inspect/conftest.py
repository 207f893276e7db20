"""A real browser, without a network. Tests that need one are skipped where there is no Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgk.inspect import Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    found = os.environ.get("MGK_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here; install one, or name it in MGK_CHROMIUM")
    with api.sync_playwright() as playwright:
        # In a container Chromium has no sandbox to offer, and /dev/shm is small.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a page from disk, offline; at the end, any complaint of the browser fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(
        page: Page, *, at: str = "", script: str = "", width: int = 1280, height: int = 900, **options: Any
    ) -> Any:
        path = page.write(tmp_path / "page.html")
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20_000)
        tab.on("console", lambda message: complaints.append(message.text) if complains(message) else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        if script:
            tab.add_init_script(script)
        tab.goto(f"file://{path}{at}")
        if page.html.count('class="map"') or '"layers":[' in page.html:
            settle(tab)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def complains(message: Any) -> bool:
    """Errors and warnings, but for one about the tests' own reading of pixels."""
    return message.type in ("error", "warning") and "willReadFrequently" not in message.text


def settle(tab: Any) -> None:
    """Wait until every head that is shown is loaded and drawn."""
    tab.wait_for_selector("body[data-busy='0']")
