"""What the publishing threads share."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from surge_dagster.engine.run.publisher import Publisher
from surge_dagster.engine.support.waiting import StopSignal


def test_error_that_no_partition_explains_ends_the_run() -> None:
    memory = Mock(stop=StopSignal(grace_seconds=60))
    publisher = Publisher(Mock(), Mock(), memory, Mock(), set())
    publisher._publish = Mock(side_effect=ValueError("it cannot be explained"))

    publisher.submit(Mock())

    with pytest.raises(ValueError, match="it cannot be explained"):
        publisher.close()
