"""Counts as people read them: "1 partition", "2,000 partitions", "a, b and 3 others"."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """A number and its noun, which is in the plural unless the number is 1."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def named(items: Iterable[str], most: int = 20) -> str:
    """The first items, and the number of the others."""
    items = list(items)
    return ", ".join(items[:most]) + (
        f" and {counted(len(items) - most, 'other')}" if len(items) > most else ""
    )
