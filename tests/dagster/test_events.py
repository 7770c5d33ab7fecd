"""What Dagster's event log holds after a run: the same on SQLite and Postgres, in batches and event
by event."""

from __future__ import annotations

import random
import shutil
import string
from collections.abc import Sequence
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import StaleStatus

from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.sources.parquet_files import _VERSION_BYTES
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration import asset_events, run_events
from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.dagster_internals import Event
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.launch import Unattended
from surge_dagster.orchestration.partition_keys import MOST_BYTES, with_short_keys
from surge_dagster.orchestration.refresh import Refresh
from tests.dagster.conftest import NAMES, Workbench, run_op, shown, stale_status, values_of
from tests.small_catalogs import assert_embedded, partition_folder

MATERIALIZATION, OBSERVATION = (
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.ASSET_OBSERVATION,
)
_SHOWN = """{ assetNodeOrError(assetKey: {path: ["%s"]}) { ... on AssetNode {
    partitionStats { numPartitions numMaterialized }
    assetMaterializations(limit: 1000) { timestamp partition metadataEntries { label ... on TextMetadataEntry { text }
        ... on IntMetadataEntry { intValue } ... on BoolMetadataEntry { boolValue } } } } } }"""


def ids_of(bench: Workbench, asset: dg.AssetKey, kind: dg.DagsterEventType) -> dict[str, int]:
    return dict(bench.instance.get_latest_storage_id_by_partition(asset, kind))


def assert_complete_record(bench: Workbench, keys: Sequence[str]) -> None:
    """Every partition has its event, which points at the events that it was made from, and those
    are older."""
    sources = ids_of(bench, NAMES.source_partitions, MATERIALIZATION)
    made = ids_of(bench, NAMES.embeddings, MATERIALIZATION)
    assert set(sources) == set(made) == set(keys)
    batches = {
        record.asset_materialization.metadata["superbatch"].value: record.storage_id
        for record in bench.instance.fetch_materializations(NAMES.superbatches, limit=1_000).records
        if record.asset_materialization and "superbatch" in record.asset_materialization.metadata
    }
    records = bench.instance.fetch_materializations(NAMES.embeddings, limit=1_000).records
    assert len(records) == len(keys)
    for record in records:
        event = record.asset_materialization
        assert event is not None and event.partition is not None and event.tags is not None
        batch = batches[event.metadata["superbatch"].value]
        assert event.tags["dagster/input_event_pointer/superbatches"] == str(batch)
        assert event.tags["dagster/input_event_pointer/source_partitions"] == str(
            sources[event.partition]
        )
        assert record.storage_id == made[event.partition] > max(batch, sources[event.partition])
    for asset in (NAMES.source_partitions, NAMES.superbatches, NAMES.embeddings):
        assert bench.instance.has_asset_key(asset)
    [newest] = bench.instance.get_asset_records([NAMES.embeddings])
    assert newest.asset_entry.last_materialization_storage_id == max(made.values())
    assert shown(bench) == (set(keys), set())


def test_a_run_leaves_a_complete_record_on_every_storage(recorded: Workbench) -> None:
    keys = [f"p{number}" for number in range(12)]
    recorded.fill(keys, 10)
    # in several SuperBatches, and put together while others are published
    recorded.write("p2", 400)
    recorded.settings |= {"b_min": 30, "b_max": 50}
    assert recorded.refresh().success
    assert_complete_record(recorded, keys)
    again = recorded.refresh()
    assert again.materialized() == {} and again.sources() == {}


def events_of_every_kind() -> list[Event]:
    """Several of each, alike and not alike, with texts and numbers that JSON writes in a special
    way."""
    events: list[Event] = []
    for number, key in enumerate(
        ["plain", 'quote"back\\slash', "größe 中文 🙂", "7316400070000000", "e"]
    ):
        partition = Partition(key, f"v{number}", lambda: iter(()), lambda: "v", rows=number or None)
        events += asset_events.source_version(NAMES, partition, changed=True)
        rate = (0.1, 1e-7, 2.0**70, float("inf"), None)[number]
        receipt = Receipt(
            key,
            "encoded",
            f"/a/{key}",
            number,
            8,
            2**60,
            "d",
            0,
            "s",
            "c",
            "w",
            "space",
            number,
            rate,
        )
        events.append(
            asset_events.embedding(
                NAMES, receipt, number, None, space_title="title", reused=number % 2 == 0
            )
        )
        metadata: dict[str, Any] = {
            "nested": {"a": [1, None]},
            "none": dg.MetadataValue.text(None or ""),
            "n": number,
        }
        events.append(dg.AssetMaterialization(NAMES.superbatches, f"SuperBatch {number}", metadata))
    # as they are stored
    return sorted(events, key=lambda event: not isinstance(event, dg.AssetObservation))


def as_read(bench: Workbench, run_id: str) -> dict[str, Any]:
    """What Dagster reads of a run's events, in every way in which its pages ask."""
    instance, storage = bench.instance, bench.instance.event_log_storage

    def of_any_run(entry: dg.EventLogEntry | None) -> dg.EventLogEntry | None:
        if entry is None or entry.dagster_event is None:
            return entry
        tags = {**(entry.dagster_event.logging_tags or {}), "run_id": ""}
        return entry._replace(
            timestamp=0.0, run_id="", dagster_event=entry.dagster_event._replace(logging_tags=tags)
        )

    def in_order(records: Sequence[dg.EventLogRecord]) -> list[object]:
        ours = [record for record in records if record.run_id == run_id]
        assert [record.storage_id for record in ours] == sorted(
            (record.storage_id for record in ours), reverse=True
        )
        return [(of_any_run(record.event_log_entry), record.partition_key) for record in ours]

    reported = [
        entry
        for entry in instance.all_logs(run_id)
        if entry.dagster_event and entry.dagster_event.asset_key
    ]
    read: dict[str, Any] = {"events": len(reported)}
    for asset in (NAMES.source_partitions, NAMES.superbatches, NAMES.embeddings):
        [record] = instance.get_asset_records([asset])
        read |= {
            f"{asset} log": [
                of_any_run(entry)
                for entry in reported
                if entry.get_dagster_event().asset_key == asset
            ],
            f"{asset} materializations": in_order(
                instance.fetch_materializations(asset, limit=100).records
            ),
            f"{asset} observations": in_order(
                instance.fetch_observations(asset, limit=100).records
            ),
            f"{asset} latest": of_any_run(instance.get_latest_materialization_event(asset)),
            f"{asset} record": of_any_run(record.asset_entry.last_materialization),
            f"{asset} last run": record.asset_entry.last_run_id == run_id,
            f"{asset} partitions": instance.get_materialized_partitions(asset),
        }
        for kind in (MATERIALIZATION, OBSERVATION):
            read[f"{asset} {kind} tags"] = storage.get_latest_tags_by_partition(
                asset, kind, [DATA_VERSION_TAG]
            )
            read[f"{asset} {kind} ids"] = sorted(
                storage.get_latest_storage_id_by_partition(asset, kind)
            )
    return read


def without_messages(read: Any) -> Any:
    """Events without what their entry in the log says around them."""
    if isinstance(read, dg.EventLogEntry):
        return read.dagster_event
    return [without_messages(part) for part in read] if isinstance(read, list | tuple) else read


def test_events_read_back_the_same_in_batches_and_event_by_event(recorded: Workbench) -> None:
    """The public call says something more in the run's log, and nothing else differs."""

    @dg.op(name="work")
    def in_batches(context) -> None:
        report_events(context.instance, context, events_of_every_kind())

    @dg.op(name="work")
    def one_by_one(context) -> None:
        for event in events_of_every_kind():
            context.log_event(event)

    batched = as_read(recorded, run_op(recorded, in_batches).run_id)
    single = as_read(recorded, run_op(recorded, one_by_one).run_id)
    assert batched["events"] == len(batched[f"{NAMES.embeddings} materializations"]) * 4 == 20
    for name, read in batched.items():
        if name.endswith((" log", " materializations", " observations", " latest", " record")):
            assert without_messages(read) == without_messages(single[name]), name
        else:
            assert read == single[name], name


def test_postgres_has_room_for_the_longest_key_and_version(postgres_bench: Workbench) -> None:
    """It compresses what it stores, so they look like nothing that repeats."""
    letters = random.Random(1).choices(
        string.ascii_letters + string.digits, k=MOST_BYTES + _VERSION_BYTES
    )
    key, version = "".join(letters[:MOST_BYTES]), "".join(letters[MOST_BYTES:])
    partition = Partition(key, version, lambda: iter(()), lambda: version)
    assert [listed.key for listed in with_short_keys([partition], ())] == [key]
    receipt = Receipt(key, "encoded", "/a", 1, 8, 2**60, "d", 0, version, "c", "w", "space")
    events = [
        *asset_events.source_version(NAMES, partition, changed=True),
        asset_events.embedding(NAMES, receipt, 1, space_title="title"),
    ]
    instance = postgres_bench.instance
    instance.add_dynamic_partitions(NAMES.partitions_name, [key])
    report_events(instance, None, events)
    tags = {"dagster/partition": key, "dagster/asset_partition_range_start": key}
    postgres_bench.pretend_run("embed_partitions", dg.DagsterRunStatus.FAILURE, tags=tags)
    assert shown(postgres_bench) == ({key}, set())


def test_run_leaves_a_complete_record_where_an_operator_turned_batches_off(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill("abc")
    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", "0")
    assert bench.refresh().success
    assert_complete_record(bench, "abc")


def assert_event_describes_its_file(
    bench: Workbench,
    key: str,
    rows: Sequence[tuple[str, str]],
    event: dg.AssetMaterialization,
    *,
    adopted: bool,
) -> None:
    """Every value of a partition's event is that of its file, and its lineage that of the run which
    made it."""
    file = bench.file(key)
    facts = assert_embedded(bench.output, file.parent.name, key, rows)
    reported = values_of(event)
    of_run = {
        name: reported.pop(name) for name in ("superbatch", "texts_per_second") if name in reported
    }
    assert len(of_run) == (0 if adopted else 2), (
        "an adopted file does not record how it was encoded"
    )
    assert reported == {
        "key": key,
        "dagster/partition_row_count": len(rows),
        "rows": len(rows),
        "dimension": 16,
        "path": str(file),
        "bytes": file.stat().st_size,
        "truncated": 0,
        "skipped_rows": 0,
        "blank_texts": 0,
        "space_title": "hash-16, 16 float32",
        "space": file.parent.name,
        "rows_reused": 0,
        "rows_encoded": len(rows),
        "oldest_encoded_at": facts.oldest_encoded_at,
        "source_version": "v1",
        "content_digest": facts.content_digest,
        "etag": str(file.stat().st_mtime_ns),
        "action": "adopted" if adopted else "encoded",
    }
    tags, upstream = dict(event.tags or {}), "dagster/input_event_pointer/superbatches"
    assert tags.pop(upstream).isdigit() is not adopted
    assert tags == {
        DATA_VERSION_TAG: facts.desired_version,
        "dagster/data_version_is_user_provided": "true",
        "dagster/code_version": asset_events.CODE_VERSION,
        "dagster/input_data_version/source_partitions": "v1",
        "dagster/input_event_pointer/source_partitions": str(
            ids_of(bench, NAMES.source_partitions, MATERIALIZATION)[key]
        ),
        "dagster/input_data_version/superbatches": "INITIAL",
    }


def test_an_event_log_that_refuses_events_ends_the_run_and_the_next_one_adopts(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill("abc", 4)
    refusals = iter([True])

    def refuse_once(
        instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, events: Sequence[Event]
    ) -> None:
        if any(event.asset_key == NAMES.embeddings for event in events) and next(refusals, False):
            raise OSError("the disk of the event log is full")
        report_events(instance, context, events)

    monkeypatch.setattr(run_events, "report_events", refuse_once)
    ran = bench.refresh()
    again = bench.retry(ran)

    assert not ran.success
    assert again.success
    assert {
        key: event.metadata["action"].value for key, event in again.materialized().items()
    } == dict.fromkeys("abc", "adopted")
    assert "the disk of the event log is full" in ran.failure()
    assert "next run adopts" in ran.failure()


def test_adopted_partition_points_at_the_event_of_the_version_that_it_was_made_from(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster shows a partition as up to date when no change of its source was observed after that
    event."""
    bench.write("a")
    bench.refresh()
    bench.instance.wipe_assets([NAMES.embeddings])
    source = ids_of(bench, NAMES.source_partitions, MATERIALIZATION)["a"]
    report_known = Refresh._report_known

    def after_a_tick(*arguments: Any) -> None:
        partition = Partition("a", "v2", lambda: iter(()), lambda: "v2")
        report_events(
            bench.instance, None, list(asset_events.source_version(NAMES, partition, changed=True))
        )
        report_known(*arguments)

    monkeypatch.setattr(Refresh, "_report_known", after_a_tick)
    event = bench.refresh().materialized()["a"]
    assert event.metadata["action"].value == "adopted"
    assert (event.tags or {})["dagster/input_event_pointer/source_partitions"] == str(source)
    assert stale_status(bench, "a") == StaleStatus.STALE


def test_source_partitions_show_their_version_their_rows_and_whether_they_were_removed(
    bench: Workbench,
) -> None:
    bench.fill("abc", 4)
    bench.launch(bench.tick())
    bench.write("a", 7, version="v2")
    shutil.rmtree(partition_folder(bench.catalog, "b"))
    bench.tick()
    bench.refresh(unattended=Unattended(removed_partitions="report"), keys=["c"])
    node = bench.ask(_SHOWN % NAMES.source_partitions.path[-1])["assetNodeOrError"]
    assert node["partitionStats"] == {"numPartitions": 3, "numMaterialized": 3}
    newest_last = reversed(node["assetMaterializations"])
    entries = {event["partition"]: event["metadataEntries"] for event in newest_last}
    found = {
        key: {each.pop("label"): next(iter(each.values())) for each in of_key}
        for key, of_key in entries.items()
    }
    of_all = {"removed": False, "dagster/partition_row_count": 4, "source_version": "v1"}
    assert found["a"] == {
        **of_all,
        "key": "a",
        "source_version": "v2",
        "dagster/partition_row_count": 7,
    }
    removal = "The source does not list this partition."
    assert found["b"] == {
        "key": "b",
        "source_version": "removed",
        "removed": True,
        "removal": removal,
    }
    assert found["c"] == {**of_all, "key": "c"}
    assert [stale_status(bench, key).name for key in "abc"] == ["STALE", "STALE", "FRESH"]


def test_events_of_a_batch_have_times_of_their_own(bench: Workbench) -> None:
    """The page of events shows one of those that have the same millisecond."""
    for number in range(60):
        bench.write(f"p{number:02}")
    runs = [bench.refresh(), bench.embed("p00", "p59", backfill="b")]
    for asset in (NAMES.source_partitions, NAMES.embeddings):
        events = bench.ask(_SHOWN % asset.path[-1])["assetNodeOrError"]["assetMaterializations"]
        times = [int(event["timestamp"]) for event in events]
        assert times == sorted(set(times), reverse=True), "the newest first"
        assert len(times) == (60 if asset == NAMES.source_partitions else 120)
        begun = bench.instance.get_run_record_by_id(runs[0].run_id)
        ended = bench.instance.get_run_record_by_id(runs[1].run_id)
        assert begun and begun.start_time and ended and ended.end_time
        assert begun.start_time < times[-1] / 1_000 and times[0] / 1_000 < ended.end_time + 1
