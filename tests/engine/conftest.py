"""An object store for the tests that need one; it starts with the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.output.object_server import ObjectServer


@pytest.fixture(scope="session")
def running_object_server() -> Iterator[ObjectServer]:
    from tests.engine.output.object_server import ObjectServer  # most tests need none of what it imports

    with ObjectServer() as server:
        yield server


@pytest.fixture
def object_server(running_object_server: ObjectServer) -> ObjectServer:
    """An empty bucket."""
    running_object_server.reset()
    return running_object_server
