"""Counts as people read them: "1 partition", "2,000 partitions"."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and its noun, which is in the plural unless the number is 1."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"
