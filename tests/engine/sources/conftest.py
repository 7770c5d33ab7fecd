"""Shared by the tests of sources: a catalog on a disk and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.sources.shops import Shop


@pytest.fixture(params=["disk", "bucket"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(
        tmp_path, request.getfixturevalue("object_server") if request.param == "bucket" else None
    )
