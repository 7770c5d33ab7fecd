"""What is shown of runs and partitions, again, with Postgres as Dagster's storage: the tests that SQLite passes."""

from __future__ import annotations

import pytest

from benchmarks.postgres_server import PostgresServer
from tests.dagster.conftest import Workbench
from tests.dagster.test_back_off import *  # noqa: F403
from tests.dagster.test_failures import *  # noqa: F403
from tests.dagster.test_refusals import *  # noqa: F403
from tests.dagster.test_runs import *  # noqa: F403
from tests.dagster.test_selection import *  # noqa: F403
from tests.dagster.test_sensor import *  # noqa: F403
from tests.dagster.test_vanished import *  # noqa: F403

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def on_postgres(postgres_bench: Workbench) -> None:
    """Every test's workbench has its instance there."""


def test_the_server_is_the_one_that_is_promised(postgres: PostgresServer) -> None:
    assert int(postgres.version) >= 15
