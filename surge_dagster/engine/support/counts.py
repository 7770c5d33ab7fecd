"""Counts as people read them: "1 partition", "2,000 partitions", "a, b and 3 others"."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, which is in the plural unless the number is 1."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{number:,} {noun.removesuffix('y')}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def named(items: Iterable[str], most: int = 20) -> str:
    """Return the first items, and the number of the others."""
    items = list(items)
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {counted(len(items) - most, 'other')}"
