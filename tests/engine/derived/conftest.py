"""Shared by the tests of derived spaces: the space that others are derived from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spaces import Spaces


@pytest.fixture
def made(three_spaces: Spaces, tmp_path: Path) -> Spaces:
    """A catalog in the space of hash://16."""
    return three_spaces.copy_to(tmp_path, ("hash://16",))
