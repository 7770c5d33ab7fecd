"""The examples of the documentation's pages."""

from __future__ import annotations

import re


def code_blocks(page: str, language: str) -> list[str]:
    """Return the configurations or programs in the text of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
