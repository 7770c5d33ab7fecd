"""Screenshots of the UI's pages in a headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.dagster.browser import NoBrowser, browser_page
from tests.dagster.dev_server import DevServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

# A blank page of this size is some 5 kB.
_LEAST_BYTES = 25_000
_MILLISECONDS = 120_000
_WIDTH, _HEIGHT = 1600, 1000


@contextmanager
def camera_on(server: DevServer, folder: Path) -> Iterator[Camera]:
    """A camera that saves screenshots in a folder; the test is skipped without a browser."""
    folder.mkdir()
    try:
        with browser_page(_WIDTH, _HEIGHT) as page:
            yield Camera(page, server, folder)
    except NoBrowser as reason:
        pytest.skip(str(reason))


class Camera:
    """Opens pages and takes screenshots."""

    def __init__(self, page: Page, server: DevServer, folder: Path) -> None:
        self._page = page
        self._url = f"http://127.0.0.1:{server.port}"
        self._folder = folder

    def take(
        self, name: str, path: str, *shows: str, click: str | None = None, height: int = _HEIGHT
    ) -> None:
        """Take a screenshot when the page shows these texts, after a click on the text `click`."""
        self._open(path, height)
        if click is not None:
            self._page.get_by_text(click, exact=True).first.click(timeout=_MILLISECONDS)
        self._take(name, shows)

    def _open(self, path: str, height: int) -> None:
        self._page.set_viewport_size({"width": _WIDTH, "height": height})
        self._page.goto(f"{self._url}{path}")

    def _take(self, name: str, shows: tuple[str, ...]) -> None:
        for text in shows:
            self._page.get_by_text(text).first.wait_for(timeout=_MILLISECONDS)
        self._page.get_by_text("Loading run logs").first.wait_for(
            state="hidden", timeout=_MILLISECONDS
        )
        self._page.wait_for_load_state("networkidle", timeout=_MILLISECONDS)
        broken = self._page.evaluate(
            "[...document.images].filter(image => image.complete && !image.naturalWidth)"
            ".map(image => image.src)"
        )
        assert not broken, "images that cannot be shown"
        screenshot = self._page.screenshot(path=self._folder / f"{name}.png", animations="disabled")
        assert len(screenshot) > _LEAST_BYTES, f"{name} is blank"
