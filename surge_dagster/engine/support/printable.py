"""Parts of messages: texts of errors and names, whatever characters they have."""

from __future__ import annotations

from typing import Any


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text as a part of a sentence; the error's type if it has
    no text."""
    return visible((str(error).splitlines() or [""])[0].rstrip(". ")) or type(error).__name__


def visible(text: str) -> str:
    """Return the text with unprintable characters escaped: names of files and columns may have
    any."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def id_text(value: Any) -> str:
    """Return an id as people write it: bytes in hex."""
    return value.hex() if isinstance(value, bytes) else str(value)
