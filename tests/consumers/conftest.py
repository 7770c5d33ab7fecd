"""A Postgres server with pgvector, which listens on a unix socket alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def postgres_with_vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL, without a database."""
    pgserver = pytest.importorskip("pgserver", reason="not installed: pgserver of the extra 'dev'")
    pytest.importorskip("pgvector", reason="not installed: the extra 'pgvector'")
    folder = tmp_path_factory.mktemp("postgres")
    for above in (folder, *folder.parents[:-2]):  # the server runs as another user where this one is root
        above.chmod(0o755)
    server = pgserver.get_server(folder / "data", cleanup_mode="stop")
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
