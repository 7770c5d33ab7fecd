"""Whole runs into an object store, through a proxy that breaks requests: the promises of a disk
hold there too."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import read_facts
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Source
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.support.footer_memory import forget_all
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import (
    Output,
    assert_nothing_is_held,
    failures,
    finish,
    receipts,
)
from tests.engine.store.object_server import (
    SECRETS,
    Fault,
    ObjectServer,
    RandomFaults,
    always,
    on,
    open_bucket,
)
from tests.small_catalogs import Rows, keys_of, numbered_rows, write_catalog

LARGE = Thresholds(b_min=10_000, b_max=10_000)


def catalog_of(partitions: int, *, large: int = 3) -> dict[str, Rows]:
    """Small partitions, and a few that are split and uploaded in parts."""
    catalog: dict[str, Rows] = {}
    for number in range(partitions):
        catalog[f"p {number}"] = numbered_rows(f"p {number}", 1 + number % 9)
    for number in range(large):
        catalog[f"large {number}"] = numbered_rows(f"large {number}", 700)
    return catalog


class Reader(threading.Thread):
    """Reads every object version that the store shows, past the proxy, while a run goes on."""

    def __init__(self, server: ObjectServer) -> None:
        super().__init__(name="reader")
        self._server = server
        self._done = threading.Event()
        self.broken: list[str] = []
        self.listings = 0
        self._seen: dict[str, str] = {}

    def run(self) -> None:
        while not self._done.is_set():
            self._read_new()
        self._read_new()

    def stop(self) -> None:
        self._done.set()
        self.join(60)

    def _read_new(self) -> None:
        self.listings += 1
        for key, etag in self._server.objects().items():
            if self._seen.get(key) == etag:
                continue
            self._seen[key] = etag
            try:
                content = self._server.content(key)
            except FileNotFoundError:  # staged segments are removed once their file is published
                continue
            try:
                if key.endswith(".json"):
                    json.loads(content)
                else:
                    with pq.ParquetFile(
                        pa.BufferReader(content), page_checksum_verification=True
                    ) as file:
                        assert file.read().num_rows == read_facts(file.metadata).rows
            except Exception as error:
                self.broken.append(f"{key}: {error}")


@pytest.fixture
def bucket(hash_pool: EncoderPool, tmp_path: Path, object_server: ObjectServer) -> Output:
    return Output(hash_pool, tmp_path, open_bucket(object_server))


def source_of(bucket: Output, catalog: Mapping[str, Rows]) -> Source:
    return open_source(write_catalog(bucket.root / "catalog", catalog))


def assert_whole(server: ObjectServer, space: str, keys: Iterable[str]) -> None:
    """Assert that each partition has its one object and that there are no others."""
    expected = {f"out/{space}/space.json"}
    for key in keys:
        expected.add(f"out/{file_name(space, key)}")
    assert set(server.objects()) == expected


@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.soak)])
def test_run_survives_faults_in_every_twentieth_request(
    object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path, scheme: str
) -> None:
    catalog = catalog_of(100)
    bucket = Output(hash_pool, tmp_path, open_bucket(object_server, scheme))
    source = source_of(bucket, catalog)
    object_server.plan = RandomFaults(0.05, seed=100)
    reader = Reader(object_server)
    reader.start()
    try:
        events = bucket.events(source, Thresholds(b_min=100, b_max=200))
        injected = object_server.injected.total()
    finally:
        object_server.plan = None
        reader.stop()

    assert failures(events) == []
    assert keys_of(receipts(events, "encoded")) == sorted(catalog)
    assert reader.broken == []
    assert reader.listings > 1
    assert injected >= 5, "the proxy broke enough requests"
    bucket.embed(source)  # removes staged rows if a removal failed
    assert_whole(object_server, bucket.space, catalog)
    assert bucket.violations(source, pool=hash_pool, reencode=1) == []


class TestFailures:
    def test_store_that_returns_no_file_ends_the_run(
        self, object_server: ObjectServer, bucket: Output
    ) -> None:
        source = source_of(bucket, catalog_of(12, large=0))
        bucket.embed(source)
        forget_all()
        before = object_server.objects()
        object_server.plan = always(Fault("status", 503), "GET", "[.]parquet")
        with pytest.raises(StoreUnavailable, match="What was published stays"):
            list(bucket.run(source).events())
        assert object_server.objects() == before

    def test_store_that_goes_down_gets_no_more_requests(
        self, object_server: ObjectServer, bucket: Output
    ) -> None:
        catalog = catalog_of(60, large=0)
        source = source_of(bucket, catalog)
        object_server.plan = on("PUT", "[.]parquet", *[None] * 20, *[Fault("status", 503)] * 1_000)
        run = bucket.run(source, LARGE)
        published: list[str] = []
        with pytest.raises(StoreUnavailable, match="What was published stays"):
            for receipt in run:
                published.append(receipt.key)
        assert_nothing_is_held(run)
        assert run.report.superbatches == 1
        # The answer to the last of them may come after another thread has ended the run: the next
        # run finds that file.
        objects = set(object_server.objects()) - {f"out/{bucket.space}/space.json"}
        assert len(objects) == 20
        assert {f"out/{file_name(bucket.space, key)}" for key in published} <= objects
        # three tries for each of the files that eight threads were writing
        assert len(object_server.requests("PUT", ".parquet")) <= 20 + 3 * 8
        object_server.plan = None
        again = bucket.events(source, LARGE)
        assert len(receipts(again, "encoded")) == len(catalog) - 20
        assert_whole(object_server, bucket.space, catalog)

    @pytest.mark.parametrize("key", ["p 3", "large 1"])
    @pytest.mark.parametrize("method", ["PUT", "HEAD"])
    def test_one_unwritable_object_of_several_fails_only_its_partition(
        self,
        object_server: ObjectServer,
        bucket: Output,
        key: str,
        method: str,
    ) -> None:
        catalog = catalog_of(12)
        source = source_of(bucket, catalog)
        bucket.embed(source, LARGE)
        denied = Fault("status", 403, code="AccessDenied")
        object_server.plan = always(denied, method, f"/{quote(quote(key))}[.]parquet")

        events = bucket.events(source, LARGE, force=True)

        [failure] = failures(events)
        assert failure.key == key
        assert failure.transient
        assert "403" in failure.reason
        assert keys_of(receipts(events, "encoded")) == sorted(catalog.keys() - {key})

    def test_invalid_credentials_for_writes_end_a_run_that_replaces_files(
        self, object_server: ObjectServer, bucket: Output
    ) -> None:
        """The store still answers reads."""
        source = source_of(bucket, catalog_of(40, large=0))
        bucket.embed(source, LARGE)
        before = object_server.objects()
        object_server.log.clear()
        invalid = Fault("status", 403, code="InvalidAccessKeyId")
        object_server.plan = always(invalid, "PUT", "[.]parquet")
        run = bucket.run(source, LARGE, force=True)
        with pytest.raises(StoreUnavailable, match="lack a right"):
            list(run.events())
        assert len(object_server.requests("PUT")) <= 8
        assert object_server.objects() == before

    @pytest.mark.parametrize("scheme", ["s3", "gs"])
    def test_no_event_log_or_error_shows_a_secret(
        self,
        object_server: ObjectServer,
        bucket: Output,
        scheme: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        catalog = catalog_of(12, large=1)
        source = source_of(bucket, catalog)
        store = open_bucket(object_server, scheme)
        shown = [
            repr(store),
            repr(StorageOptions(secret_access_key=SECRETS[1], session_token=SECRETS[2])),
        ]
        object_server.plan = RandomFaults(0.1, seed=1, stalls=0)
        with caplog.at_level(logging.DEBUG):
            run = bucket.run(source, Thresholds(b_min=30, b_max=60), store=store)
            shown += map(repr, finish(run))
            object_server.plan = always(Fault("status", 403))
            with pytest.raises(Exception, match="403") as caught:
                list(bucket.run(source, Thresholds(b_min=30, b_max=60), store=store))
        shown += [
            json.dumps(run.report.as_dict()),
            str(caught.getrepr(style="native")),
            caplog.text,
        ]
        object_server.plan = None
        for key in catalog:
            file = store.open(file_name(bucket.space, key))
            shown.append(repr(read_facts(pq.read_metadata(file))))
        for secret in SECRETS[1:]:
            assert secret not in "".join(shown)
