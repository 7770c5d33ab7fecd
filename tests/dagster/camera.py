"""Pictures of the UI's pages in a headless Chromium, taken once a page shows what it is to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.browser import NoBrowser, browser_page
from tests.dagster.dev_server import DevServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

# A blank page of this size is some 5 kB.
_LEAST_BYTES = 25_000
_MILLISECONDS = 120_000
_WIDTH, _HEIGHT = 1600, 1000


@contextmanager
def camera_on(server: DevServer, folder: Path) -> Iterator[Camera]:
    """A camera whose pictures lie in a folder; without a browser the test is skipped and says what to install."""
    folder.mkdir()
    try:
        with browser_page(_WIDTH, _HEIGHT) as page:
            yield Camera(page, server, folder)
    except NoBrowser as reason:
        pytest.skip(str(reason))


class Camera:
    """Opens pages and takes pictures of them."""

    def __init__(self, page: Page, server: DevServer, folder: Path) -> None:
        self._page = page
        self._url = f"http://127.0.0.1:{server.port}"
        self._folder = folder

    def take(self, name: str, path: str, *shows: str, click: str | None = None, height: int = _HEIGHT) -> None:
        """A picture of a page once it shows these texts.

        Args:
            click: text to be clicked before; `shows` is what comes then.
        """
        self._open(path, height)
        if click is not None:
            self._page.get_by_text(click, exact=True).first.click(timeout=_MILLISECONDS)
        self._take(name, shows)

    def take_entry(self, name: str, path: str, entry: str, *shows: str) -> None:
        """A picture of what a metadata entry shows when it is clicked."""
        self._open(path, _HEIGHT)
        row = self._page.locator("tr").filter(has=self._page.get_by_text(entry, exact=True))
        row.get_by_text("[Show Markdown]").click(timeout=_MILLISECONDS)
        self._take(name, shows)

    def take_chart(self, name: str, path: str, entry: str) -> None:
        """A picture of a chart among the metadata."""
        self.take_entry(name, path, entry)
        widths = self._page.evaluate(
            "[...document.querySelectorAll('img[alt=chart]')].map(image => image.naturalWidth)"
        )
        assert len(widths) == 1 and widths[0] > 0, f"{entry} is no image"

    def lines(self) -> set[str]:
        """What the page that was opened last says, line by line."""
        return set(self._page.locator("body").inner_text().splitlines())

    def _open(self, path: str, height: int) -> None:
        self._page.set_viewport_size({"width": _WIDTH, "height": height})
        self._page.goto(f"{self._url}{path}")

    def _take(self, name: str, shows: tuple[str, ...]) -> None:
        for text in shows:
            self._page.get_by_text(text).first.wait_for(timeout=_MILLISECONDS)
        self._page.get_by_text("Loading run logs").first.wait_for(state="hidden", timeout=_MILLISECONDS)
        self._page.wait_for_load_state("networkidle", timeout=_MILLISECONDS)
        broken = self._page.evaluate(
            "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        )
        assert not broken, "images that cannot be shown"
        picture = self._page.screenshot(path=self._folder / f"{name}.png", animations="disabled")
        assert len(picture) > _LEAST_BYTES, f"{name} is blank"
