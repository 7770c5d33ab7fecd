"""Names as a disk has them: any bytes. What is not UTF-8 comes from Python as text with lone surrogates in it.

Such text goes through no JSON, no Parquet metadata, no log and no database, so it is told apart where names are listed.
"""

from __future__ import annotations

import re

_BYTE = re.compile("[\udc80-\udcff]")


def is_text(name: str) -> bool:
    """Whether a name or path is UTF-8 on its disk."""
    return name.isascii() or not _BYTE.search(name)


def printable(name: str) -> str:
    """The name with each byte that is no UTF-8 percent-encoded."""
    return _BYTE.sub(lambda byte: f"%{ord(byte.group()) & 0xFF:02X}", name)
