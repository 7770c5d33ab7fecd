"""A headless Chromium for tests that photograph pages of Dagster, and for the benchmark of these
pages.

Debian has the browser as the package `chromium`; Playwright, which drives it, is in the extra
`dev`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class NoBrowser(Exception):
    """Chromium or Playwright is missing; the message says what to install."""


@contextmanager
def browser_page(width: int = 1600, height: int = 1000) -> Iterator[Page]:
    """Start a browser and give an empty page of it, or raise `NoBrowser`."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise NoBrowser("not installed: the Debian package chromium (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowser("not installed: Playwright, of the extra 'dev'") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()
