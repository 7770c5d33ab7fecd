"""Skips tests that need an extra which is not installed; nothing is imported, which takes seconds
of some packages."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def require(extra: str, *packages: str) -> None:
    """Skip the test or the file that calls this where a package of the extra is missing."""
    if not all(_is_installed(package) for package in packages):
        pytest.skip(f"not installed: the extra '{extra}'", allow_module_level=True)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False
