"""A server of embeddings with faults, in a thread of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from surge_dagster.engine.endpoint import client
from tests.engine.endpoint.fault_server import FaultServer, fault_server


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of this process are tried again after milliseconds."""
    monkeypatch.setattr(client, "_FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """A server that makes no faults until a test asks for some."""
    with fault_server() as running:
        yield running
