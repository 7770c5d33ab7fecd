"""Everything that the tests use of Dagster's private modules, each with its reason.

Most of it is what Dagster's pages show, which Dagster computes in functions without a public name:
asking for it over HTTP would start a server for each test. The imports stand in the functions, so
that processes which need one of them do not import the others.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
from sqlalchemy import Engine, QueuePool, create_engine, event

# Engines of SQLite databases by their URL.
_ENGINES: dict[str, Engine] = {}


def stale_status(
    instance: dg.DagsterInstance, definitions: dg.Definitions, asset: dg.AssetKey, key: str | None
) -> str:
    """Return FRESH, STALE or MISSING for a partition; the UI calls stale "Unsynced"."""
    from dagster._core.definitions.data_version import CachingStaleStatusResolver
    from dagster._core.loader import LoadingContextForTest

    graph = definitions.get_repository_def().asset_graph
    loading = LoadingContextForTest(instance)
    return CachingStaleStatusResolver(instance, graph, loading).get_status(asset, key).value


def standard_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with names and types that Dagster knows, without their prefix."""
    from dagster._core.definitions.metadata import TableMetadataSet
    from dagster._core.definitions.metadata.metadata_set import UriMetadataSet

    table = TableMetadataSet.extract(metadata)
    found = {name.removeprefix("dagster/"): value for name, value in {**table}.items()}
    uri = UriMetadataSet.extract(metadata).uri
    return found if uri is None else {**found, "uri": uri}


def freshness(
    instance: dg.DagsterInstance, definitions: dg.Definitions, asset: dg.AssetKey, at: datetime
) -> str:
    """Return PASS, WARN, FAIL or UNKNOWN, as Dagster's daemon decides it at a time."""
    from dagster._core.definitions.freshness_evaluator import FRESHNESS_EVALUATORS_BY_POLICY_TYPE
    from dagster._core.loader import LoadingContextForTest
    from dagster._core.test_utils import freeze_time

    node = definitions.get_repository_def().asset_graph.get(asset)
    assert node.freshness_policy is not None
    evaluator = FRESHNESS_EVALUATORS_BY_POLICY_TYPE[type(node.freshness_policy)]()
    loading: Any = LoadingContextForTest(instance)
    with freeze_time(at):
        return asyncio.run(evaluator.evaluate_freshness(loading, node)).value


def ask_graphql(instance: dg.DagsterInstance, query: str) -> dict[str, Any]:
    """Return the answer of the schema that the UI's pages are made of.

    The public client needs a server, whose start takes ten seconds.
    """
    from dagster._core.remote_origin import InProcessCodeLocationOrigin
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
    from dagster_graphql.schema import create_schema

    root = Path(__file__).parents[2]
    target = LoadableTargetOrigin(
        module_name="surge_dagster.definitions", working_directory=str(root)
    )
    location = InProcessCodeLocationOrigin(target, location_name="surge")
    with WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget(location)) as process:
        asked: Any = create_schema().execute_async(
            query, context_value=process.create_request_context()
        )
        answer = asyncio.run(asked)

    assert not answer.errors, answer.errors
    return answer.data or {}


def shown_by_the_ui(definitions: dg.Definitions) -> str:
    """Return everything that a code location sends to the UI, to look for secrets in it."""
    from dagster._core.remote_representation.external_data import RepositorySnap

    return dg.serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))


def repository_of_file(path: Path, attribute: str) -> Any:
    """Return what a run's process loads from a file: `get_definition`, `get_reconstructable_job`.

    `dg.reconstructable` takes a function and no job of a repository.
    """
    from dagster._core.definitions.reconstruct import ReconstructableRepository

    return ReconstructableRepository.for_file(str(path), attribute, str(path.parent))


def stock_event_log(folder: Path) -> Any:
    """Return Dagster's own SQLite event log in a folder; the instance always makes ours."""
    from dagster._core.storage.event_log import SqliteEventLogStorage

    return SqliteEventLogStorage(str(folder))


def store_tick(
    instance: dg.DagsterInstance,
    name: str,
    status: str,
    *,
    location: str,
    repository: str,
    failures: int,
    error: str,
) -> None:
    """Store a tick of a sensor as Dagster's daemon does.

    Args:
        failures: ticks that have failed in a row, this one included.
        error: the cause of a failure.
    """
    from dagster._core.definitions.run_request import InstigatorType
    from dagster._core.definitions.selector import InstigatorSelector
    from dagster._core.scheduler.instigation import TickData, TickStatus
    from dagster_shared.error import SerializableErrorInfo

    selector = InstigatorSelector(location_name=location, repository_name=repository, name=name)
    cause = SerializableErrorInfo(f"{error}\n", [], "ConfigError")
    failed = SerializableErrorInfo("Error occurred", [], "SensorExecutionError", cause)
    tick = TickData(
        "origin",
        name,
        InstigatorType.SENSOR,
        TickStatus[status],
        time.time(),
        error=failed if failures else None,
        selector_id=selector.get_id(),
        consecutive_failure_count=failures,
    )
    instance.create_tick(tick)


def origin_of_location(name: str) -> Any:
    """Return the origin of a code location, which the daemon gives a sensor's context."""
    from dagster._core.remote_origin import InProcessCodeLocationOrigin
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

    return InProcessCodeLocationOrigin(LoadableTargetOrigin(), location_name=name)


def origin_of_job(name: str) -> Any:
    """Return the origin of a job in workspace.yaml, without which Dagster retries no run of it."""
    from dagster._core.remote_origin import (
        ManagedGrpcPythonEnvCodeLocationOrigin,
        RemoteJobOrigin,
        RemoteRepositoryOrigin,
    )
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

    target = LoadableTargetOrigin(
        module_name="surge_dagster.definitions", working_directory=str(Path.cwd())
    )
    location = ManagedGrpcPythonEnvCodeLocationOrigin(target, "surge")
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, "__repository__"), name)


@contextmanager
def quick_databases() -> Iterator[None]:
    """Keep what Dagster prepares for each access to SQLite, which takes a third of the tests' time.

    Dagster reads its hundred migrations for the database of each run, makes an engine for each
    access, and infers the schema of a resource's class for each resource of a run. Databases also
    skip fsync; data of killed processes stay. Engines are open until `close_databases`.
    """
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from dagster._config.pythonic_config import infer_schema_from_config_class, resource
    from dagster._core.storage.event_log.sqlite import sqlite_event_log
    from dagster._core.storage.runs.sqlite import sqlite_run_storage
    from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage

    migrations_by_folder: dict[str, ScriptDirectory] = {}
    read_migrations = ScriptDirectory.from_config

    def migrations(config: Config) -> ScriptDirectory:
        folder = config.get_main_option("script_location") or ""
        if folder not in migrations_by_folder:
            migrations_by_folder[folder] = read_migrations(config)
        return migrations_by_folder[folder]

    def engine(url: str, **options: Any) -> Engine:
        if url not in _ENGINES:
            made = create_engine(url, **(options | {"poolclass": QueuePool, "max_overflow": -1}))
            made.dispose = lambda close=True: None  # Dagster calls it after each access
            _ENGINES[url] = made
        return _ENGINES[url]

    @cache
    def inferred(kind: type[dg.Config], omitted: frozenset[str]) -> dg.Field:
        return infer_schema_from_config_class(kind, fields_to_omit=set(omitted))

    def schema(kind: type[dg.Config], fields_to_omit: set[str], **defaults: Any) -> dg.Field:
        if defaults:
            return infer_schema_from_config_class(kind, fields_to_omit=fields_to_omit, **defaults)
        return inferred(kind, frozenset(fields_to_omit))

    def connected(connection: Any, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", connected)
    with (
        mock.patch.object(ScriptDirectory, "from_config", migrations),
        mock.patch.object(sqlite_event_log, "create_engine", engine),
        mock.patch.object(sqlite_run_storage, "create_engine", engine),
        mock.patch.object(sqlite_schedule_storage, "create_engine", engine),
        mock.patch.object(resource, "infer_schema_from_config_class", schema),
    ):
        yield
    event.remove(Engine, "connect", connected)


def close_databases() -> None:
    """Close the connections that `quick_databases` has kept."""
    for engine in _ENGINES.values():
        engine.pool.dispose()
    _ENGINES.clear()


def quicken_daemons() -> None:
    """Let Dagster's daemons look every second instead of every 5 or 30, and miss no failed run.

    Dagster has no setting for it. It stores that a run failed before it stores the run's status,
    and looks at each failure once: if it looks between the two, no run is launched again. Here it
    waits for the status.
    """
    import dagster._daemon.controller as controller
    from dagster._daemon.auto_run_reexecution import auto_run_reexecution
    from dagster._daemon.auto_run_reexecution.event_log_consumer import EventLogConsumerDaemon
    from dagster._daemon.daemon import IntervalDaemon

    patient: Any = IntervalDaemon.__init__

    def quick(self: Any, interval_seconds: float, **options: Any) -> None:
        patient(self, min(interval_seconds, 1), **options)

    def relaunch_ended(context: Any, records: Any, logger: Any) -> Any:
        ids = [record.dagster_run.run_id for record in records]
        while not all(record.dagster_run.is_finished for record in records):
            time.sleep(0.02)
            records = context.instance.get_run_records(dg.RunsFilter(run_ids=ids))
        return auto_run_reexecution.consume_new_runs_for_automatic_reexecution(
            context, records, logger
        )

    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1
    mock.patch.object(IntervalDaemon, "__init__", quick).start()
    functions = property(lambda self: [relaunch_ended])
    mock.patch.object(EventLogConsumerDaemon, "handle_updated_runs_fns", functions).start()
