"""A headless Chromium, where there is one: what a person who opens a page gets, and when.

Debian has it as the package `chromium`; Playwright, which drives it, is in the extra `dev`.
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
    """There is none on this machine; the text says what to install."""


@contextmanager
def browser_page(width: int = 1600, height: int = 1000) -> Iterator[Page]:
    """An empty page of a browser of its own.

    Raises:
        NoBrowser: Chromium or Playwright is missing.
    """
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise NoBrowser("no Chromium here: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowser("no Playwright here: install the extra 'dev'") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()
