"""Whole runs into an object store, through a proxy that breaks requests: the promises of a disk
hold there too."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import read_facts
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore
from surge_dagster.engine.support.footer_memory import forget_all
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.runs import (
    assert_nothing_is_held,
    failures,
    finish,
    make_run,
    of_kind,
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
    sizes = {f"p {number}": 1 + number % 9 for number in range(partitions)}
    sizes |= {f"large {number}": 700 for number in range(large)}
    return {key: numbered_rows(key, size) for key, size in sizes.items()}


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


def assert_whole(server: ObjectServer, space: str, catalog: Mapping[str, Rows]) -> None:
    """Assert that each partition has its one object and that there are no others."""
    expected = {f"out/{file_name(space, key)}" for key in catalog} | {f"out/{space}/space.json"}
    assert set(server.objects()) == expected


@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.soak)])
def test_run_survives_faults_in_every_twentieth_request(
    object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path, scheme: str
) -> None:
    catalog = catalog_of(100)
    source = open_source(write_catalog(tmp_path / "catalog", catalog))
    store = open_bucket(object_server, scheme)
    object_server.plan = RandomFaults(0.05, seed=100)
    reader = Reader(object_server)
    reader.start()
    try:
        run = make_run(hash_pool, source, store, Thresholds(b_min=100, b_max=200))
        events = finish(run)
        injected = object_server.injected.total()
    finally:
        object_server.plan = None
        reader.stop()

    assert failures(events) == []
    assert keys_of(receipts(events, "encoded")) == sorted(catalog)
    assert reader.broken == []
    assert reader.listings > 1
    assert injected >= 5, "the proxy broke enough requests"
    finish(make_run(hash_pool, source, store))  # removes staged rows if a removal failed
    assert_whole(object_server, run.space.name, catalog)
    found = list(verify(source, store, run.space, pool=hash_pool, reencode=1))
    assert of_kind(found, Violation) == []


class TestFailures:
    def test_store_that_returns_no_file_ends_the_run(
        self, object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path
    ) -> None:
        source = open_source(write_catalog(tmp_path / "catalog", catalog_of(12, large=0)))
        finish(make_run(hash_pool, source, open_bucket(object_server)))
        forget_all()
        before = object_server.objects()
        object_server.plan = always(Fault("status", 503), "GET", "[.]parquet")
        with pytest.raises(StoreUnavailable, match="What was published stays"):
            list(make_run(hash_pool, source, open_bucket(object_server)).events())
        assert object_server.objects() == before

    def test_store_that_goes_down_gets_no_more_requests(
        self, object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path
    ) -> None:
        catalog = catalog_of(60, large=0)
        source = open_source(write_catalog(tmp_path / "catalog", catalog))
        object_server.plan = on("PUT", "[.]parquet", *[None] * 20, *[Fault("status", 503)] * 1_000)
        run = make_run(hash_pool, source, open_bucket(object_server), LARGE)
        reported: list[Any] = []
        with pytest.raises(StoreUnavailable, match="What was published stays"):
            for event in run.events():
                reported.append(event)
        assert_nothing_is_held(run)
        assert run.report.superbatches == 1
        published = {
            f"out/{file_name(run.space.name, receipt.key)}" for receipt in receipts(reported)
        }
        assert len(published) == 20
        assert set(object_server.objects()) == published | {f"out/{run.space.name}/space.json"}
        # three tries for each of the files that eight threads were writing
        puts = [target for target in object_server.requests("PUT") if ".parquet" in target]
        assert len(puts) <= 20 + 3 * 8
        object_server.plan = None
        again = make_run(hash_pool, source, open_bucket(object_server), LARGE)
        assert len(receipts(finish(again), "encoded")) == len(catalog) - 20
        assert_whole(object_server, again.space.name, catalog)

    @pytest.mark.parametrize("key", ["p 3", "large 1"])
    @pytest.mark.parametrize("method", ["PUT", "HEAD"])
    def test_one_unwritable_object_of_several_fails_only_its_partition(
        self,
        object_server: ObjectServer,
        hash_pool: EncoderPool,
        tmp_path: Path,
        key: str,
        method: str,
    ) -> None:
        catalog = catalog_of(12)
        source = open_source(write_catalog(tmp_path / "catalog", catalog))
        finish(make_run(hash_pool, source, open_bucket(object_server), LARGE))
        denied = Fault("status", 403, code="AccessDenied")
        object_server.plan = always(denied, method, f"/{quote(quote(key))}[.]parquet")

        run = make_run(hash_pool, source, open_bucket(object_server), LARGE, force=True)
        events = finish(run)

        [failure] = failures(events)
        assert failure.key == key
        assert failure.transient
        assert "403" in failure.reason
        assert keys_of(receipts(events, "encoded")) == sorted(catalog.keys() - {key})

    def test_credentials_that_expire_while_files_are_read_end_the_run(
        self, object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path
    ) -> None:
        source = open_source(write_catalog(tmp_path / "catalog", catalog_of(12, large=0)))
        finish(make_run(hash_pool, source, open_bucket(object_server)))
        forget_all()
        expired = Fault("status", 400, code="ExpiredToken")
        object_server.plan = always(expired, "GET", "[.]parquet")

        with pytest.raises(StoreUnavailable, match="ExpiredToken"):
            list(make_run(hash_pool, source, open_bucket(object_server)).events())

    def test_invalid_credentials_for_writes_end_a_run_that_replaces_files(
        self, object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path
    ) -> None:
        """The store still answers reads."""
        source = open_source(write_catalog(tmp_path / "catalog", catalog_of(40, large=0)))
        finish(make_run(hash_pool, source, open_bucket(object_server), LARGE))
        before = object_server.objects()
        object_server.log.clear()
        invalid = Fault("status", 403, code="InvalidAccessKeyId")
        object_server.plan = always(invalid, "PUT", "[.]parquet")
        run = make_run(hash_pool, source, open_bucket(object_server), LARGE, force=True)
        with pytest.raises(StoreUnavailable, match="lack a right"):
            list(run.events())
        assert len(object_server.requests("PUT")) <= 8
        assert object_server.objects() == before

    @pytest.mark.parametrize("scheme", ["s3", "gs"])
    def test_no_event_log_or_error_shows_a_secret(
        self,
        object_server: ObjectServer,
        hash_pool: EncoderPool,
        tmp_path: Path,
        scheme: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        catalog = catalog_of(12, large=1)
        source = open_source(write_catalog(tmp_path / "catalog", catalog))
        store = open_bucket(object_server, scheme)
        shown = [
            repr(store),
            repr(StorageOptions(secret_access_key=SECRETS[1], session_token=SECRETS[2])),
        ]
        object_server.plan = RandomFaults(0.1, seed=1, stalls=0)
        with caplog.at_level(logging.DEBUG):
            run = make_run(hash_pool, source, store, Thresholds(b_min=30, b_max=60))
            shown += map(repr, finish(run))
            object_server.plan = always(Fault("status", 403))
            with pytest.raises(Exception, match="403") as caught:
                list(make_run(hash_pool, source, store, Thresholds(b_min=30, b_max=60)))
        shown += [
            json.dumps(run.report.as_dict()),
            str(caught.getrepr(style="native")),
            caplog.text,
        ]
        shown += [
            repr(read_facts(pq.read_metadata(store.open(name))))
            for name in self._files(object_server, store)
        ]
        for secret in SECRETS[1:]:
            assert not [text for text in shown if secret in text]

    @staticmethod
    def _files(server: ObjectServer, store: ObjectStore) -> list[str]:
        server.plan = None
        return [
            found.name
            for folder in store.folders()
            for found in store.list(folder)
            if "parquet" in found.name
        ]
