"""Types of command line arguments that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A comma-separated list of known names, as an argument's type."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return names

    return parse
