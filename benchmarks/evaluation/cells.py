"""Lines and cells of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator


def head(*cells: str) -> Iterator[str]:
    """The two lines that begin a table."""
    yield line(*cells)
    yield line(*("---" for _ in cells))


def line(*cells: str) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


def beside(ours: float | None, theirs: float | None, form: str) -> str:
    """Our value, with the paper's in italics behind it where it has one."""
    if ours is None:
        return ""
    return format(ours, form) if theirs is None else f"{format(ours, form)} (*{format(theirs, form)}*)"
