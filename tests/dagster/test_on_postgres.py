"""The tests of runs, partitions and the sensor, repeated with Postgres as Dagster's storage."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
import yaml

from tests.dagster.conftest import ROOT, Workbench
from tests.dagster.postgres_server import PostgresServer
from tests.dagster.test_back_off import *  # noqa: F403
from tests.dagster.test_failures import *  # noqa: F403
from tests.dagster.test_launch import *  # noqa: F403
from tests.dagster.test_refusals import *  # noqa: F403
from tests.dagster.test_removed_partitions import *  # noqa: F403
from tests.dagster.test_runs import *  # noqa: F403
from tests.dagster.test_sensor import *  # noqa: F403

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def on_postgres(postgres_bench: Workbench) -> None:
    """The workbench of each test, with its instance on Postgres."""


def test_deployment_finds_its_database(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_PG_PASSWORD", "which nobody asks for")
    postgres.create_database("deployed")
    config = yaml.safe_load((ROOT / "deploy" / "docker" / "dagster.yaml").read_text())
    database = config["storage"]["postgres"]["postgres_db"]
    database |= {
        "hostname": "127.0.0.1",
        "port": postgres.port,
        "username": "postgres",
        "db_name": "deployed",
    }
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(config))

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        instance.add_dynamic_partitions("catalog", ["a"])
        assert instance.get_dynamic_partitions("catalog") == ["a"]
        assert instance.get_runs_count() == 0
