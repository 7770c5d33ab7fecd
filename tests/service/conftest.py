"""Services of these tests time their passes without a busy thread, which takes two seconds of each start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from surge_dagster.service import space_lanes
from tests.engine.encoder.faulty_pools import no_leaks

__all__ = ["no_leaks"]


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space_lanes, "busy_thread", contextlib.nullcontext)
        yield
