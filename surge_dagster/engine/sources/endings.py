"""Which formats a file may have, by the ending of its name."""

from __future__ import annotations

import re

ENDING = re.compile(
    r"\.(?:(?P<parquet>parquet|pq)|(?P<arrow>arrow|feather|ipc|arrows)"
    r"|(?:(?P<csv>csv|tsv)|(?P<json>jsonl|ndjson|json))(?:\.(?P<packed>gz|zst))?)$",
    re.IGNORECASE,
)


def is_source_file(name: str) -> bool:
    """Whether the ending of a file's name is one of a format that is read."""
    return bool(ENDING.search(name))


def ending_of(name: str) -> tuple[str, str]:
    """A file's name without the ending that says its format, and that ending."""
    ending = ENDING.search(name)
    return (name[: ending.start()], ending[0]) if ending else (name, "")
