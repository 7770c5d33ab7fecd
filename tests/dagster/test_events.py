"""What Dagster's event log holds after a run: the same on SQLite and Postgres, in batches and event
by event."""

from __future__ import annotations

import random
import shutil
import string
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import dagster as dg
import pytest

from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.sources.parquet_files import _VERSION_BYTES
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration import asset_events
from surge_dagster.orchestration import events as events_module
from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.dagster_internals import Event
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.partition_keys import (
    MOST_BYTES,
    to_partition_key,
    with_short_keys,
)
from tests.dagster.conftest import (
    NAMES,
    Workbench,
    numbered_keys,
    range_tags,
    run_op,
    shown,
    stale_status,
    values_of,
)
from tests.small_catalogs import assert_embedded, numbered_rows, partition_folder

MATERIALIZATION, OBSERVATION = (
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.ASSET_OBSERVATION,
)
_SHOWN = """{ assetNodeOrError(assetKey: {path: ["%s"]}) { ... on AssetNode {
    assetMaterializations(limit: 1000) { timestamp partition metadataEntries {
        label ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue }
        ... on BoolMetadataEntry { boolValue } } } } } }"""


def ids_of(bench: Workbench, asset: dg.AssetKey, kind: dg.DagsterEventType) -> dict[str, int]:
    return dict(bench.instance.get_latest_storage_id_by_partition(asset, kind))


def assert_complete_record(bench: Workbench, keys: Sequence[str]) -> None:
    """Every partition has one event, which points at older events that it was made from; the newest
    event is that of the whole output."""
    sources = ids_of(bench, NAMES.source_partitions, MATERIALIZATION)
    found = bench.instance.fetch_materializations(NAMES.embeddings, limit=1_000).records
    newest, *records = found
    events = {record.partition_key: record for record in records}
    assert newest.partition_key is None
    assert len(records) == len(keys)
    assert set(events) == set(sources) == set(keys)
    for key, record in events.items():
        event = record.asset_materialization
        assert event is not None
        tags = event.tags or {}
        assert tags["dagster/input_event_pointer/source_partitions"] == str(sources[str(key)])
        assert record.storage_id > sources[str(key)]
    assert shown(bench) == (set(keys), set())


def test_a_run_leaves_a_complete_record_on_every_storage(recorded: Workbench) -> None:
    keys = numbered_keys(12)
    recorded.fill(keys, 10)
    # in several SuperBatches, and put together while others are published
    recorded.write("p02", 400)
    recorded.settings |= {"b_min": 30, "b_max": 50}

    assert recorded.refresh().success

    assert_complete_record(recorded, keys)

    again = recorded.refresh()
    assert again.materialized() == {}
    assert again.sources() == {}


def events_of_every_kind() -> list[Event]:
    """Several of each, alike and not alike, with texts and numbers that JSON writes in a special
    way."""
    events: list[Event] = []
    for number, key in enumerate(
        ["plain", 'quote"back\\slash', "größe 中文 🙂", "7316400070000000", "e"]
    ):
        partition_key = to_partition_key(key)
        events += asset_events.source_version(
            NAMES, partition_key, f"v{number}", number or None, changed=True
        )
        texts = ("d", 0, "s", "c", "w", "space")
        receipt = Receipt(key, "encoded", f"/a/{key}", number, 8, 2**60, *texts, number)
        events.append(asset_events.embedding(NAMES, NAMES.embeddings, receipt, number, "title"))
        metadata: dict[str, Any] = {
            "nested": {"a": [1, None]},
            "none": dg.MetadataValue.text(None or ""),
            "rate": (0.1, 1e-7, 2.0**70, float("inf"), 0.0)[number],
        }
        events.append(dg.AssetMaterialization(NAMES.superbatches, f"SuperBatch {number}", metadata))
    # as they are stored
    return sorted(events, key=lambda event: not isinstance(event, dg.AssetObservation))


def as_read(bench: Workbench, run_id: str) -> dict[str, Any]:
    """Return what Dagster reads of a run's events in the ways in which its pages ask."""
    instance = bench.instance
    read = defaultdict[str, Any](list)
    for entry in instance.all_logs(run_id):
        if entry.dagster_event and entry.dagster_event.asset_key:
            read[f"{entry.dagster_event.asset_key} log"].append(timeless(entry.dagster_event))
    for asset in (NAMES.source_partitions, NAMES.superbatches, NAMES.embeddings):
        for record in (
            *instance.fetch_materializations(asset, limit=100).records,
            *instance.fetch_observations(asset, limit=100).records,
        ):
            if record.run_id == run_id:
                read[f"{asset} events"].append(timeless(record.event_log_entry))
        read[f"{asset} partitions"] = instance.get_materialized_partitions(asset)
        for kind in (MATERIALIZATION, OBSERVATION):
            storage = instance.event_log_storage
            tags = storage.get_latest_tags_by_partition(asset, kind, [DATA_VERSION_TAG])
            read[f"{asset} {kind}"] = tags
    return read


def timeless(entry: Any) -> Any:
    """Return an event without the id of its run."""
    event = entry.get_dagster_event() if isinstance(entry, dg.EventLogEntry) else entry
    return event._replace(logging_tags={**(event.logging_tags or {}), "run_id": ""})


def test_events_read_back_the_same_in_batches_and_event_by_event(recorded: Workbench) -> None:
    @dg.op(name="work")
    def in_batches(context) -> None:
        report_events(context.instance, context, events_of_every_kind())

    @dg.op(name="work")
    def one_by_one(context) -> None:
        for event in events_of_every_kind():
            context.log_event(event)

    batched = as_read(recorded, run_op(recorded, in_batches).run_id)

    single = as_read(recorded, run_op(recorded, one_by_one).run_id)

    assert len(batched[f"{NAMES.embeddings} log"]) == 5
    assert batched == single


def test_postgres_has_room_for_the_longest_key_and_version(postgres_bench: Workbench) -> None:
    """It compresses what it stores, so they look like nothing that repeats."""
    letters = random.Random(1).choices(
        string.ascii_letters + string.digits, k=MOST_BYTES + _VERSION_BYTES
    )
    key = "".join(letters[:MOST_BYTES])
    version = "".join(letters[MOST_BYTES:])

    partition = Partition(key, version, lambda: iter(()), lambda: version)

    assert [listed.key for listed in with_short_keys([partition])] == [key]

    receipt = Receipt(key, "encoded", "/a", 1, 8, 2**60, "d", 0, version, "c", "w", "space")
    events = [
        *asset_events.source_version(NAMES, key, version, changed=True),
        asset_events.embedding(NAMES, NAMES.embeddings, receipt, 1, "title"),
    ]
    instance = postgres_bench.instance
    instance.add_dynamic_partitions(NAMES.partitions_name, [key])
    report_events(instance, None, events)
    tags = {"dagster/partition": key, **range_tags(key, key)}

    postgres_bench.pretend_run("embed_partitions", dg.DagsterRunStatus.FAILURE, tags=tags)

    assert shown(postgres_bench) == ({key}, set())


def test_run_leaves_a_complete_record_where_an_operator_turned_batches_off(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill("abc")

    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", "0")

    assert bench.refresh().success

    assert_complete_record(bench, "abc")


def assert_adopted_event_describes_its_file(
    bench: Workbench, key: str, event: dg.AssetMaterialization
) -> None:
    file = bench.file(key)
    facts = assert_embedded(bench.output, file.parent.name, key, numbered_rows(key, 4))
    assert values_of(event) == {
        "key": key,
        "dagster/partition_row_count": 4,
        "rows": 4,
        "dimension": 16,
        "path": str(file),
        "dagster/uri": file.as_uri(),
        "bytes": file.stat().st_size,
        "truncated": 0,
        "skipped_rows": 0,
        "blank_texts": 0,
        "rejected_rows": 0,
        "transient_rows": 0,
        "space_title": "hash-16, 16 float32",
        "space": file.parent.name,
        "rows_reused": 0,
        "rows_encoded": 4,
        "oldest_encoded_at": facts.oldest_encoded_at,
        "source_version": "v1",
        "content_digest": facts.content_digest,
        "etag": str(file.stat().st_mtime_ns),
        "action": "fresh",
    }
    source = ids_of(bench, NAMES.source_partitions, MATERIALIZATION)[key]
    tags = dict(event.tags or {})
    del tags["dagster/input_event_pointer/superbatches"]
    assert tags == {
        DATA_VERSION_TAG: facts.desired_version,
        "dagster/data_version_is_user_provided": "true",
        "dagster/code_version": asset_events.CODE_VERSION,
        "dagster/input_data_version/source_partitions": "v1",
        "dagster/input_event_pointer/source_partitions": str(source),
        "dagster/input_data_version/superbatches": "INITIAL",
    }


def test_files_whose_events_were_refused_are_adopted_by_the_retry(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill("abc", 4)
    refusals = iter([True])

    def refuse_once(
        instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, events: Sequence[Event]
    ) -> None:
        of_files = any(event.asset_key == NAMES.embeddings for event in events)
        if of_files and next(refusals, False):
            raise OSError("the disk of the event log is full")
        report_events(instance, context, events)

    monkeypatch.setattr(events_module, "report_events", refuse_once)
    ran = bench.refresh()

    again = bench.retry(ran)

    assert not ran.success
    assert "the disk of the event log is full" in ran.failure()
    assert "next run adopts" in ran.failure()
    assert again.success
    assert again.metrics()["texts_encoded"] == 0
    assert set(again.materialized()) == set("abc")

    for key, event in again.materialized().items():
        assert_adopted_event_describes_its_file(bench, str(key), event)


def test_source_partitions_show_their_version_and_rows(bench: Workbench) -> None:
    bench.fill("ac", 4)
    bench.launch(bench.tick())
    bench.write("a", 7, version="v2")
    bench.tick()

    found = shown_entries(bench)

    shown = {"removed": False, "dagster/partition_row_count": 4, "source_version": "v1"}

    assert found["c"] == {**shown, "key": "c"}

    changed = {"dagster/partition_row_count": 7, "source_version": "v2"}
    assert found["a"] == {**shown, **changed, "key": "a"}
    assert stale_status(bench, "a") == "STALE"
    assert stale_status(bench, "c") == "FRESH"


def test_source_partition_that_was_removed_says_so(bench: Workbench) -> None:
    bench.fill("bc", 4)
    bench.launch(bench.tick())
    shutil.rmtree(partition_folder(bench.catalog, "b"))

    bench.refresh(removed_partitions="report")

    found = shown_entries(bench)["b"]

    assert found["source_version"] == "removed"
    assert found["removed"] is True
    assert stale_status(bench, "b") == "STALE"


def shown_entries(bench: Workbench) -> dict[str, dict[str, Any]]:
    """Return the last metadata of each source partition, as its page shows them."""
    node = bench.ask(_SHOWN % NAMES.source_partitions.path[-1])["assetNodeOrError"]
    found: dict[str, dict[str, Any]] = {}
    for event in reversed(node["assetMaterializations"]):  # the newest last
        entries = event["metadataEntries"]
        found[event["partition"]] = {
            entry.pop("label"): next(iter(entry.values())) for entry in entries
        }
    return found


def test_events_of_a_batch_have_times_of_their_own(bench: Workbench) -> None:
    """The page of events shows only one of several events of the same millisecond."""
    bench.fill(numbered_keys(60))

    bench.refresh()

    # one of them of the whole output
    for asset, count in ((NAMES.source_partitions, 60), (NAMES.embeddings, 61)):
        events = bench.ask(_SHOWN % asset.path[-1])["assetNodeOrError"]["assetMaterializations"]
        times = [int(event["timestamp"]) for event in events]
        assert len(times) == count
        assert times == sorted(set(times), reverse=True), "the newest first"
