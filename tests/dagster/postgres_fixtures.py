"""Fixtures `postgres_bench` and `recorded`: the workbench with an instance on Postgres."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest
import yaml

from tests.dagster.postgres_server import NoPostgres, PostgresServer, postgres_server

if TYPE_CHECKING:
    from tests.dagster.conftest import Workbench

_TABLES = "with_tables"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server with one database that has Dagster's tables, for copying."""
    try:
        with postgres_server(durable=False) as server:
            yield server
    except NoPostgres as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def postgres_home(
    postgres: PostgresServer, empty_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    home = tmp_path_factory.mktemp("postgres-home")
    postgres.create_database(_TABLES)
    _write_settings(home, empty_home, postgres.url(_TABLES))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_dynamic_partitions("catalog")
    return home


@pytest.fixture
def postgres_bench(
    bench: Workbench, postgres: PostgresServer, postgres_home: Path
) -> Iterator[Workbench]:
    home = bench.root / "postgres"
    shutil.copytree(postgres_home, home)
    _write_settings(
        home, bench.root / "home", postgres.create_database(bench.root.name, like=_TABLES)
    )
    with dg.DagsterInstance.from_config(str(home)) as instance:
        bench.instance = instance
        yield bench


@pytest.fixture(params=["sqlite", "postgres"])
def recorded(request: pytest.FixtureRequest, bench: Workbench) -> Workbench:
    return bench if request.param == "sqlite" else request.getfixturevalue("postgres_bench")


def _write_settings(home: Path, like: Path, url: str) -> None:
    """The settings of another home, with Postgres as their storage."""
    settings = yaml.safe_load((like / "dagster.yaml").read_text())
    del settings["event_log_storage"]
    settings["storage"] = {"postgres": {"postgres_url": url}}
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))
