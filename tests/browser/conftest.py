"""One Chromium for all tests in this folder. `make test-browser` installs it and runs them;
other targets leave them out, and nothing of a browser is imported before a test asks for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.install import chromium
from tests.browser.view import View

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Look = Callable[..., View]


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """Debian's Chromium without a window."""
    library = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")
    binary = chromium()
    if binary is None:
        pytest.skip("there is no Chromium: make test-browser installs it")
    with library.sync_playwright() as playwright:
        # Pages are our own, and where root runs the tests there is no sandbox to be had.
        running = playwright.chromium.launch(executable_path=binary, chromium_sandbox=False)
        yield running
        running.close()


@pytest.fixture
def look(browser: "Browser") -> Iterator[Look]:
    """Opens pages; they are closed at the end of the test."""
    views: list[View] = []

    def opened(path: Path, **options: object) -> View:
        views.append(View(browser, path, **options))
        return views[-1]

    yield opened
    for view in views:
        view.close()
