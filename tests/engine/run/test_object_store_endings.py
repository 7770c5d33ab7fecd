"""Runs into an object store that does not answer: neither a run nor a process waits for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.tables.opening import open_source
from tests.engine.run.test_run_object_store import LARGE, catalog_of
from tests.engine.runs import (
    assert_nothing_is_held,
    failures,
    finish,
    make_run,
    receipts,
    wait_for_publishing_threads,
)
from tests.engine.store.object_server import BUCKET, SECRETS, Fault, ObjectServer
from tests.small_catalogs import keys_of, write_catalog

pytestmark = pytest.mark.processes

UNAVAILABLE = Fault("status", 503)
SILENCE = Fault("stall")
# The process handles the signal even if the process that runs the tests ignores it.
_COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["embed", "catalog", "s3://vectors/stopped", "--model", "hash://16"]
from surge_dagster.commands.cli import main
main()
"""
# Like a run process of Dagster, it ends when the interpreter ends.
_LIBRARY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.store.object_client import ClientLimits
from surge_dagster.engine.store.object_store import open_object_store
try:
    limits = ClientLimits(timeout_seconds=600, part_bytes=16 * 1024)
    store = open_object_store("s3://vectors/stopped", limits=limits)
    with EncoderPool(EncodingSpec("hash://16")) as pool:
        list(EmbeddingRun(open_source("catalog"), store, pool, grace_seconds=0.5))
except KeyboardInterrupt:
    sys.exit(130)
"""


def open_patiently(server: ObjectServer) -> ObjectStore:
    """The bucket with the limits that users have."""
    options = StorageOptions(
        endpoint=server.url, access_key_id=SECRETS[0], secret_access_key=SECRETS[1]
    )
    return open_object_store(f"s3://{BUCKET}/out", options)


def test_stopped_run_leaves_no_waiting_thread(
    object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path
) -> None:
    store = open_patiently(object_server)
    catalog = catalog_of(20, large=1)
    source = open_source(write_catalog(tmp_path / "catalog", catalog))
    run = make_run(hash_pool, source, store, Thresholds(b_min=100, b_max=200), grace_seconds=0.5)

    def stop_at_the_first(method: str, target: str) -> Fault | None:
        if method in ("PUT", "POST") and "parquet" in target:
            run.stop()
            return UNAVAILABLE
        return None

    object_server.plan = stop_at_the_first
    assert failures(list(run.events())) == []
    wait_for_publishing_threads()
    object_server.plan = None
    again = make_run(hash_pool, source, store, Thresholds(b_min=100, b_max=200))
    assert keys_of(receipts(finish(again), "encoded")) == sorted(catalog), (
        "the same store serves the next run"
    )


def test_no_thread_waits_for_a_store_that_is_down(
    object_server: ObjectServer, hash_pool: EncoderPool, tmp_path: Path
) -> None:
    """The credentials of one request are refused while another one waits for its next try."""
    source = open_source(write_catalog(tmp_path / "catalog", catalog_of(8, large=0)))
    waits = threading.Event()

    def hold(method: str, target: str) -> None:
        if method == "PUT" and re.search("p%25203[.]parquet", target):
            assert waits.wait(60)

    def refuse(method: str, target: str) -> Fault | None:
        if method != "PUT" or ".parquet" not in target:
            return None
        if re.search("p%25203[.]parquet", target):
            return Fault("status", 403, code="InvalidAccessKeyId")
        waits.set()
        return UNAVAILABLE

    object_server.before = hold
    object_server.plan = refuse
    run = make_run(hash_pool, source, open_patiently(object_server), LARGE)
    with pytest.raises(StoreUnavailable, match="403"):
        list(run.events())
    assert_nothing_is_held(run)


@pytest.mark.parametrize(
    ("program", "requests", "fault"),
    [
        (_COMMAND, "(PUT|POST) .*parquet", UNAVAILABLE),
        (_LIBRARY, "PUT .*parquet", SILENCE),
        (_LIBRARY, "GET", SILENCE),
    ],
)
def test_interrupted_process_ends(
    object_server: ObjectServer, tmp_path: Path, program: str, requests: str, fault: Fault
) -> None:
    """Takes up to 10 s, because the process imports the whole command line."""
    write_catalog(tmp_path / "catalog", catalog_of(20, large=1))
    received = threading.Event()

    def refuse(method: str, target: str) -> Fault | None:
        # not of an earlier test
        if re.match(requests, f"{method} {target}") and "stopped" in target:
            received.set()
            return fault
        return None

    object_server.plan = refuse
    environment = {
        "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_ENDPOINT_URL": object_server.url,
        "AWS_REGION": "eu-west-1",
        "SURGE_GRACE_SECONDS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as running:
        assert received.wait(60)
        running.send_signal(signal.SIGINT)
        try:
            _, error = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, error
    assert ("run the command again" in error) == (program is _COMMAND)
