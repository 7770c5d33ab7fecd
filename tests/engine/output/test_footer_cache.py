"""What a bucket's footers said is kept on disk: it spares requests, and decides nothing that they would not."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import PublishedFile, file_name, new_writer
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.output import freshness
from surge_dagster.engine.output.footer_cache import FooterCache
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.store import Store, StoredObject
from tests.engine.store.object_server import BUCKET, Fault, ObjectServer, always
from tests.small_catalogs import partition_of

KEYS = [f"partition {number}" for number in range(6)]
COLUMNS = schema(pa.string(), 4, "float32", include_text=False)
HEAD = 32  # the digest
SECRETS = ("secret-key-of-the-test", "secret-session-of-the-test", "secret-of-the-endpoint")
STORED = StoredObject("s/k.parquet", 1000, '"abc"')


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache lies in this test."""
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(freshness, "_known", {})
    return tmp_path / "footers"


@pytest.fixture
def store(object_server: ObjectServer) -> ObjectStore:
    opened = open_bucket(object_server)
    for key in KEYS:
        publish(opened, key)
    object_server.log.clear()
    return opened


def open_bucket(server: ObjectServer, path: str = "out") -> ObjectStore:
    options = StorageOptions(
        endpoint=server.url,
        access_key_id="AKIATESTKEY",
        secret_access_key=SECRETS[0],
        session_token=SECRETS[1],
    )
    return open_object_store(
        f"s3://{BUCKET}/{path}",
        options,
        limits=ClientLimits(timeout_seconds=5.0, first_backoff_seconds=0.001),
        retrier=lambda where: Retrier(where, sleep=lambda _: None),
    )


def facts_of(key: str, version: str = "v1") -> FileFacts:
    return FileFacts(key, "s", "m", "fp32", version, "0" * 32, "1" * 32, 2, 4, 0)


def file_k() -> PublishedFile:
    return PublishedFile(STORED, facts_of("k"), COLUMNS)


def publish(store: Store, key: str, version: str = "v1") -> StoredObject:
    with (
        store.create(file_name("s", key)) as upload,
        new_writer("parquet", upload.sink, COLUMNS, facts_of(key, version)) as writer,
    ):
        writer.append(pa.array(["a", "b"]), None, np.zeros((2, 4), np.float32))
        writer.close()
        return upload.publish(lambda: None)


def decide(store: Store, monkeypatch: pytest.MonkeyPatch, version: str = "v1") -> list[str]:
    """What a process that has just begun finds."""
    monkeypatch.setattr(freshness, "_known", {})
    state = OutputState(store, "s")
    partitions = [partition_of(key, [], version=version) for key in KEYS]
    return [state.status(partition) for partition in state.looked_at(partitions)]


def reads(server: ObjectServer) -> list[str]:
    """Objects that were asked for, and nothing that was listed; then forgets them."""
    found = [target for target in server.requests("GET") if "list-type" not in target]
    server.log.clear()
    return found


def test_a_second_process_asks_for_one_listing_and_for_no_object(
    store: ObjectStore, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decide(store, monkeypatch) == ["fresh"] * len(KEYS)
    assert len(object_server.log) == 1 + len(KEYS)
    assert len(reads(object_server)) == len(KEYS)
    assert decide(store, monkeypatch) == ["fresh"] * len(KEYS)
    assert len(object_server.log) == 1
    assert decide(store, monkeypatch, version="v2") == ["stale"] * len(KEYS)
    assert reads(object_server) == []


def test_an_interrupt_waits_for_no_answer_and_nothing_is_kept_after_it(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    state = OutputState(store, "s")
    opened, held = threading.Event(), threading.Semaphore(0)

    def hold(method: str, target: str) -> None:
        held.release()
        opened.wait(60)

    def interrupt() -> None:
        for _ in range(4):
            assert held.acquire(timeout=60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    object_server.before = hold
    signal.signal(signal.SIGUSR1, end)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        state.look_at(KEYS[:4])
    assert not held.acquire(blocking=False), "the client has not even given up the first answers"
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    interrupting.join()
    opened.set()
    for thread in threading.enumerate():
        if thread.name == "surge-footer":
            assert thread.daemon, "no process waits for them"
            thread.join(60)
    assert [state._is_unread(file_name("s", key)) for key in KEYS[:4]] == [True] * 4


def test_an_object_that_changed_is_read_again_and_no_other(
    store: ObjectStore, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(store, monkeypatch)
    publish(store, KEYS[2], "v2")
    object_server.log.clear()
    assert decide(store, monkeypatch) == ["fresh", "fresh", "stale", "fresh", "fresh", "fresh"]
    assert [target.rpartition("/")[2].split("?")[0] for target in reads(object_server)] == ["partition%25202.parquet"]
    assert decide(store, monkeypatch)[2] == "stale"
    assert reads(object_server) == []


def test_an_object_that_is_replaced_after_the_listing_is_kept_as_it_was_read(
    store: ObjectStore, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = OutputState(store, "s")
    stored = publish(store, KEYS[0], "v2")
    state.look_at(KEYS)
    found = state.file(KEYS[0])
    assert found is not None and (found.stored, found.facts.source_version) == (stored, "v2")
    object_server.log.clear()
    assert decide(store, monkeypatch)[0] == "stale"
    assert reads(object_server) == []


def with_digest(stream: bytes, folder: Path) -> bytes:
    [file] = folder.iterdir()
    return hashlib.sha256(f"surge footers 3\0{file.name}\0".encode() + stream).digest() + stream


def table_of(content: bytes) -> pa.Table:
    return pa.ipc.open_stream(content[HEAD:]).read_all()


def file_of(table: pa.Table, folder: Path) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return with_digest(sink.getvalue().to_pybytes(), folder)


DAMAGE: dict[str, Callable[[bytes, Path], bytes]] = {
    "empty": lambda _, __: b"",
    "cut off": lambda content, _: content[:-1],
    "cut to its head": lambda content, _: content[: HEAD - 10],
    "a flipped bit": lambda content, _: content[:-40] + bytes([content[-40] ^ 4]) + content[-39:],
    "no Arrow stream": lambda _, folder: with_digest(b"x" * 1000, folder),
    "other columns": lambda content, folder: file_of(table_of(content).drop_columns(["columns"]), folder),
    "a damaged schema": lambda content, folder: file_of(changed(table_of(content), "columns", lambda _: b"x"), folder),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_cache_changes_nothing_but_the_time_it_takes(
    store: ObjectStore, object_server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    decide(store, monkeypatch)
    [file] = folder.iterdir()
    file.write_bytes(DAMAGE[damage](file.read_bytes(), folder))
    object_server.log.clear()
    assert decide(store, monkeypatch) == ["fresh"] * len(KEYS)
    assert len(reads(object_server)) == len(KEYS)
    assert decide(store, monkeypatch) == ["fresh"] * len(KEYS)
    assert reads(object_server) == [], "it was made anew"


def changed(table: pa.Table, name: str, change: Callable[[Any], Any]) -> pa.Table:
    column = pa.array([change(value) for value in table[name].to_pylist()], table.schema.field(name).type)
    return table.set_column(table.schema.get_field_index(name), name, column)


def test_changed_facts_do_not_make_a_stale_partition_fresh(
    store: ObjectStore, object_server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(store, monkeypatch)
    [file] = folder.iterdir()
    table = changed(table_of(file.read_bytes()), "surge.source_version", lambda _: b"v3")
    file.write_bytes(file_of(table, folder))
    object_server.log.clear()
    assert decide(store, monkeypatch, "v3") == ["stale"] * len(KEYS)
    assert len(reads(object_server)) == len(KEYS), "what is doubtful is read"
    assert decide(store, monkeypatch, "v1") == ["fresh"] * len(KEYS)


def test_the_cache_of_another_output_or_space_is_not_used(
    store: ObjectStore, object_server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(store, monkeypatch)
    [file] = folder.iterdir()
    other = open_bucket(object_server, "other")
    for key in KEYS:
        publish(other, key)
    object_server.log.clear()
    assert decide(other, monkeypatch) == ["fresh"] * len(KEYS)
    assert len(reads(object_server)) == len(KEYS)
    [copied] = set(folder.iterdir()) - {file}
    copied.write_bytes(file.read_bytes())  # the same names, sizes and etags: only the output tells them apart
    assert decide(other, monkeypatch) == ["fresh"] * len(KEYS)
    assert len(reads(object_server)) == len(KEYS)
    for name, identity in (("s", "another"), ("t", "this")):
        cache = FooterCache("this", "s")
        cache.add(file_k())
        cache.save({STORED.name: STORED})
        assert FooterCache("this", "s").file(STORED) == file_k()
        assert FooterCache(identity, name).file(STORED) is None


def test_what_has_no_etag_is_not_kept_and_what_is_gone_is_dropped() -> None:
    cache = FooterCache("this", "s")
    nameless = StoredObject("s/j.parquet", 1, "")
    cache.add(PublishedFile(nameless, facts_of("j"), COLUMNS))
    cache.add(file_k())
    cache.save({})
    assert FooterCache("this", "s").file(nameless) is None
    again = FooterCache("this", "s")
    again.add(PublishedFile(StoredObject("s/i.parquet", 1, "e"), facts_of("i"), COLUMNS))
    again.save({})
    assert FooterCache("this", "s").file(STORED) is None


@pytest.mark.usefixtures("folder")
def test_files_of_one_memory_store_are_not_taken_for_those_of_another() -> None:
    for version in ("v1", "v2"):  # the same names, sizes and etags
        store = open_object_store("memory://")
        publish(store, "k", version)
        state = OutputState(store, "s")
        state.look_at(["k"])
        assert state.status(partition_of("k", [], version=version)) == "fresh"


def test_no_secret_is_written(
    object_server: ObjectServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bucket(object_server)
    publish(store, KEYS[0])
    decide(store, monkeypatch)
    [file] = folder.iterdir()
    said = file.name.encode() + file.read_bytes() + repr(table_of(file.read_bytes()).to_pylist()).encode()
    assert not [secret for secret in SECRETS if secret.encode() in said]
    endpoint = object_server.url.replace("://", f"://somebody:{SECRETS[2]}@")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)  # the options take no such endpoint
    options = StorageOptions(access_key_id="a", secret_access_key="b")
    assert open_object_store(f"s3://{BUCKET}/out", options).identity == store.identity
    assert file.stat().st_mode & 0o077 == 0


def test_a_cache_folder_that_cannot_be_written_only_costs_requests(
    store: ObjectStore, object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert decide(store, monkeypatch) == ["fresh"] * len(KEYS)
        assert len(reads(object_server)) == len(KEYS)


def test_an_object_that_the_store_does_not_give_is_named_and_the_others_are_decided(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    object_server.plan = always(Fault("status", 500), "GET", "partition%25203")
    state = OutputState(store, "s")
    state.look_at(KEYS)
    found = {}
    for key in KEYS:
        try:
            found[key] = state.status(partition_of(key, []))
        except TransientError as error:
            found[key] = str(error)
    assert found.pop(KEYS[3]).startswith("partition 'partition 3': whether its file is up to date cannot be told")
    assert set(found.values()) == {"fresh"}


def test_a_store_that_is_down_is_told_as_such(store: ObjectStore, object_server: ObjectServer) -> None:
    state = OutputState(store, "s")
    object_server.plan = always(Fault("status", 503), "GET")
    with pytest.raises(StoreUnavailable):
        state.look_at(KEYS)


WRITER = """
import sys
import pyarrow as pa
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.output.footer_cache import FooterCache
from surge_dagster.engine.store.store import StoredObject

shared, key = StoredObject("s/k.parquet", 1000, '"abc"'), sys.argv[1]
for number in range(10):
    cache, own = FooterCache("this", "s"), StoredObject(f"s/{key}.parquet", number, "e")
    for stored, name in ((shared, "k"), (own, key)):
        facts = FileFacts(name, "s", "m", "fp32", "v1", "0" * 32, "1" * 32, 2, 4, 0)
        cache.add(PublishedFile(stored, facts, schema(pa.string(), 4, "float32", include_text=False)))
    cache.save({shared.name: shared, own.name: own})
"""


def test_of_two_processes_that_write_at_once_a_third_reads_the_one_or_the_other(folder: Path) -> None:
    first = FooterCache("this", "s")
    first.add(file_k())
    first.save({STORED.name: STORED})
    root = Path(__file__).parents[3]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, key], cwd=root, env=os.environ) for key in "ab"]
    while any(writer.poll() is None for writer in writers):
        assert FooterCache("this", "s").file(STORED) == file_k()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(list(folder.iterdir())) == 1, "and nothing is left aside"
