"""Makes Dagster's SQLite databases quick enough for hundreds of tests, each with an instance of its
own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import dagster as dg
from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster._config.pythonic_config import infer_schema_from_config_class, resource
from dagster._core.storage.event_log.sqlite import sqlite_event_log
from dagster._core.storage.runs.sqlite import sqlite_run_storage
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage
from sqlalchemy import Engine, QueuePool, create_engine, event

# Engines of SQLite databases by their URL.
_ENGINES: dict[str, Engine] = {}


class _CompiledStatements(dict[Any, Any]):
    """Shared by engines of one kind: the first part of SQLAlchemy's key is the engine's own
    dialect."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1:], default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(key[1:], compiled)


@contextmanager
def quick_databases() -> Iterator[None]:
    """Make Dagster's SQLite databases skip fsync (data of killed processes stays) and keep what
    each access prepares.

    Each run has its own database, and Dagster would read its hundred migrations for each of them.
    It also makes an engine and a connection for each access: an engine compiles every statement
    anew, and a connection reads the schema. Connections stay open until `close_databases`. Dagster
    also infers the schema of a resource's class for each of the dozen resources that a run makes.
    """
    read: dict[str, ScriptDirectory] = {}
    compiled = _CompiledStatements()
    from_config = ScriptDirectory.from_config

    def migrations(config: Config) -> ScriptDirectory:
        folder = config.get_main_option("script_location") or ""
        if folder not in read:
            read[folder] = from_config(config)
        return read[folder]

    def engine(url: str, **options: Any) -> Engine:
        if url not in _ENGINES:
            options |= {
                "poolclass": QueuePool,
                "max_overflow": -1,
                "execution_options": {"compiled_cache": compiled},
            }
            _ENGINES[url] = create_engine(url, **options)
            _ENGINES[url].dispose = lambda close=True: None  # Dagster calls it after each access
        return _ENGINES[url]

    @cache
    def schema(kind: type[dg.Config], omitted: frozenset[str]) -> dg.Field:
        return infer_schema_from_config_class(kind, fields_to_omit=set(omitted))

    def known_schema(kind: type[dg.Config], fields_to_omit: set[str], **defaults: Any) -> dg.Field:
        if defaults:
            return infer_schema_from_config_class(kind, fields_to_omit=fields_to_omit, **defaults)
        return schema(kind, frozenset(fields_to_omit))

    def connected(connection: Any, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", connected)
    with (
        mock.patch.object(ScriptDirectory, "from_config", migrations),
        mock.patch.object(sqlite_event_log, "create_engine", engine),
        mock.patch.object(sqlite_run_storage, "create_engine", engine),
        mock.patch.object(sqlite_schedule_storage, "create_engine", engine),
        mock.patch.object(resource, "infer_schema_from_config_class", known_schema),
    ):
        yield
    event.remove(Engine, "connect", connected)


def close_databases() -> None:
    """Close the connections that `quick_databases` has kept."""
    for engine in _ENGINES.values():
        engine.pool.dispose()
    _ENGINES.clear()
