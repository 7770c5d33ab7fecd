"""What a tick of the sensor costs at many partitions: CPU seconds of the process that evaluates it.

Writes a catalog and its finished output into a temporary folder, puts both on record in a Dagster instance of its own,
and evaluates the sensor as a code server does: once in a process that knows nothing, then again. Then it takes the
records away and lets ticks find the same catalog new. The source's files are links to one file, so that their
modification times are equal; they are read like any others. Records are written with SQL, since a hundred thousand
events take Dagster many minutes.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from dagster._core.definitions.sensor_definition import SensorExecutionData

from benchmarks.rounds import say
from benchmarks.targets import Target
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.embedding_file import EmbeddingFileWriter, matrix_of
from surge_dagster.engine.output.freshness import OutputState, file_name
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources import parquet_files
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.settings import Settings, load_settings

_NAMES = CatalogNames()
_DIMENSION = 16


def sensor_document(partitions: int = 40_000, ticks: int = 3) -> dict[str, Any]:
    """Measure; gives a JSON-ready document whose seconds are CPU seconds of one tick."""
    with tempfile.TemporaryDirectory(prefix="surge-sensor-") as folder, _instance(Path(folder)) as instance:
        settings = load_settings(
            source=f"{folder}/catalog", output=f"{folder}/output", model=f"hash://{_DIMENSION}", check_parity=False
        )
        say(f"writing {partitions:,} partitions and their outputs")
        _write_catalog(Path(settings.source), partitions)
        _write_outputs(settings, partitions)
        sensor = _Sensor(instance, embedding_catalog(settings))
        sensor.tick()  # registers the first partition
        sensor.tick()  # and adopts its file
        _link_catalog(Path(settings.source), partitions)
        _put_on_record(instance, Path(folder) / "home", partitions)
        # The files were changed a moment ago; a catalog that stays as it is has settled.
        with mock.patch.object(parquet_files, "_SETTLED_NS", 0):
            first = sensor.tick()
            idle = [sensor.tick() for _ in range(ticks)]
            message = sensor.found.skip_message
            instance.wipe()
            sensor.cursor = None
            adding = []
            while not adding or sensor.found.dynamic_partitions_requests:
                adding.append(sensor.tick())

        return {
            "partitions": partitions,
            "first_tick_cpu_seconds": round(first, 3),
            "idle_tick_cpu_seconds": round(statistics.median(idle), 3),
            "idle_ticks_cpu_seconds": [round(seconds, 3) for seconds in idle],
            "adding_ticks_cpu_seconds": [round(seconds, 3) for seconds in adding],
            "message": message,
        }


class _Sensor:
    """The sensor, with what Dagster's daemon does between its ticks, short of launching runs and storing events."""

    def __init__(self, instance: dg.DagsterInstance, definitions: dg.Definitions) -> None:
        self.cursor: str | None = None
        self.found: SensorExecutionData
        self._instance = instance
        self._resources = definitions.resources
        self._repository = definitions.get_repository_def()

    def tick(self) -> float:
        """Evaluate once; gives the CPU seconds of it."""
        begun = time.process_time()
        with dg.build_sensor_context(
            self._instance, self.cursor, repository_def=self._repository, resources=self._resources
        ) as context:
            self.found = self._repository.get_sensor_def(_NAMES.sensor).evaluate_tick(context)
        seconds = time.process_time() - begun
        say(f"a tick of {seconds:.2f} s")
        self.cursor = self.found.cursor
        for request in self.found.dynamic_partitions_requests or []:
            self._instance.add_dynamic_partitions(_NAMES.partitions_name, list(request.partition_keys))
        if len(self.found.asset_events) == 1:
            self._instance.report_runless_asset_event(self.found.asset_events[0])
        return seconds


@contextmanager
def _instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    home = folder / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    planned = {"DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "true"}
    with mock.patch.dict(os.environ, planned), dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


def _key(index: int) -> str:
    return f"category {index:05d}"


def _folder(catalog: Path, index: int) -> Path:
    return catalog / f"partition=category%20{index:05d}"


def _write_catalog(catalog: Path, partitions: int) -> None:
    """The first partition; the others come once it is on record."""
    _folder(catalog, 0).mkdir(parents=True)
    rows = pa.table({"id": ["id-0", "id-1"], "text": ["a short text", "another one"]})
    version = {b"surge.source_version": b"v1"}
    pq.write_table(rows.replace_schema_metadata(version), _folder(catalog, 0) / "part-0.parquet")


def _link_catalog(catalog: Path, partitions: int) -> None:
    first = _folder(catalog, 0) / "part-0.parquet"
    for index in range(1, partitions):
        _folder(catalog, index).mkdir()
        (_folder(catalog, index) / "part-0.parquet").hardlink_to(first)


def _write_outputs(settings: Settings, partitions: int) -> None:
    """A run's own file for the first partition, and its like for the others."""
    store = settings.open_store()
    with EncoderPool(settings.encoding_spec(), check_parity=False) as pool:
        run = EmbeddingRun(settings.open_source(), store, pool)
        list(run)
    facts = OutputState(store, run.space.name).facts(_key(0))
    assert facts is not None
    output = Path(settings.output)
    [batch] = pq.read_table(output / file_name(run.space.name, _key(0))).combine_chunks().to_batches()
    ids, texts = batch.column("id"), batch.column("text")
    for index in range(1, partitions):
        with (
            pa.OSFile(str(output / file_name(run.space.name, _key(index))), "wb") as sink,
            EmbeddingFileWriter(sink, ids.type, _DIMENSION, "float32", include_text=True) as writer,
        ):
            writer.append(ids, texts, matrix_of(batch))  # pyright: ignore[reportArgumentType]
            writer.close(replace(facts, partition_key=_key(index)))


def _put_on_record(instance: dg.DagsterInstance, home: Path, partitions: int) -> None:
    """Register every partition and copy the first one's observation and materialization for each of the others."""
    instance.add_dynamic_partitions(_NAMES.partitions_name, [_key(index) for index in range(partitions)])
    [database] = home.glob("history/runs/index.db")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TEMP TABLE others (partition TEXT)")
        connection.executemany("INSERT INTO others VALUES (?)", [(_key(index),) for index in range(1, partitions)])
        columns = [row[1] for row in connection.execute("PRAGMA table_info(event_logs)") if row[1] != "id"]
        tags = [row[1] for row in connection.execute("PRAGMA table_info(asset_event_tags)") if row[1] != "id"]
        firsts = connection.execute(
            "SELECT id, dagster_event_type FROM event_logs WHERE partition = ? ORDER BY id", (_key(0),)
        ).fetchall()
        assert [kind for _, kind in firsts] == ["ASSET_OBSERVATION", "ASSET_MATERIALIZATION"], firsts
        for event, kind in firsts:
            chosen = ", ".join("others.partition" if name == "partition" else f"event_logs.{name}" for name in columns)
            connection.execute(
                f"INSERT INTO event_logs ({', '.join(columns)}) SELECT {chosen} FROM event_logs, others WHERE id = ?",
                (event,),
            )
            copied = ", ".join("copy.id" if name == "event_id" else f"asset_event_tags.{name}" for name in tags)
            connection.execute(
                f"INSERT INTO asset_event_tags ({', '.join(tags)}) SELECT {copied} "
                "FROM asset_event_tags, event_logs AS copy "
                "WHERE asset_event_tags.event_id = ? AND copy.dagster_event_type = ? AND copy.id > ? "
                "AND copy.partition != ?",
                (event, kind, event, _key(0)),
            )


def sensor_lines(found: dict[str, Any]) -> list[str]:
    """The document as a table."""
    names = ("first_tick_cpu_seconds", "idle_ticks_cpu_seconds", "adding_ticks_cpu_seconds")
    return [
        "",
        f"{found['partitions']:,} partitions",
        *(f"{name.replace('_', ' '):32} {found[name]}" for name in names),
    ]


def sensor_targets(found: dict[str, Any]) -> list[Target]:
    """What a tick may cost."""
    idle = found["idle_tick_cpu_seconds"]
    return [Target("CPU seconds of a tick with nothing to do", 2.0, idle, at_least=False)]
