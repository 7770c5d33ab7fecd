"""Connections of the client that writes: through which proxy, and how long each step may take."""

from __future__ import annotations

import socket

import pytest
import urllib3

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.storage_options import StorageOptions
from surge_dagster.engine.store.store import StoredObject
from tests.engine.store.object_server import BUCKET, ObjectServer


def test_a_store_that_takes_no_body_is_waited_for_as_long_as_one_that_does_not_answer() -> None:
    """Connecting may take longer here than the tests have; more is sent than lies between two sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        store = open_object_store(
            f"s3://{BUCKET}/out",
            StorageOptions(
                endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}",
                access_key_id="k",
                secret_access_key="s",
                timeout_seconds=0.5,
                connect_timeout_seconds=3600.0,
                part_bytes=64 * 1024 * 1024,
            ),
            retrier=lambda where: Retrier(where, attempts=1),
        )
        with (
            pytest.raises(TransientError, match="timeout: no answer in time"),
            store.create("space/a.parquet") as upload,
        ):
            upload.write(bytes(32 * 1024 * 1024))
            upload.publish(lambda: None)


NOWHERE = "http://127.0.0.1:1"


def store_at(endpoint: str) -> ObjectStore:
    return open_object_store(
        f"s3://{BUCKET}/out",
        StorageOptions(endpoint=endpoint, access_key_id="k", secret_access_key="s"),
        retrier=lambda where: Retrier(where, attempts=2, sleep=lambda _: None),
    )


def write(store: ObjectStore) -> StoredObject:
    with store.create("space/a.parquet") as upload:
        upload.write(b"content")
        return upload.publish(lambda: None)


class TestProxies:
    """The front stands for a proxy too: nobody listens where the store is said to be."""

    @pytest.fixture(autouse=True)
    def no_proxy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    @pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
    def test_the_environments_proxy_is_taken_to_write_as_it_is_to_read(
        self, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        monkeypatch.setenv(variable, object_server.url)
        store = store_at(NOWHERE)
        stored = write(store)
        assert list(store.list("space")) == [stored]
        with store.open(stored.name) as file:
            assert file.read() == b"content"
        assert store.retries == {}

    def test_a_store_that_needs_none_is_reached_without(
        self, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", NOWHERE)
        monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
        store = store_at(object_server.url)
        assert list(store.list("space")) == [] and write(store).size == 7

    def test_a_proxy_that_is_away_is_told_without_its_password(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTP_PROXY", NOWHERE.replace("//", "//user:hunter2@"))
        store = store_at("http://store.test")
        with pytest.raises(TransientError, match="refused: no connection could be made") as caught:
            write(store)
        assert "hunter2" not in str(caught.getrepr(style="native"))
        assert store._client._http.proxy_headers == urllib3.make_headers(proxy_basic_auth="user:hunter2")  # pyright: ignore[reportAttributeAccessIssue]

    def test_a_proxy_of_another_kind_is_refused_before_work_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTP_PROXY", "gopher://user:hunter2@127.0.0.1:1")
        with pytest.raises(ConfigError, match="neither http:// nor https://; uploads cannot") as caught:
            store_at(NOWHERE)
        assert "hunter2" not in str(caught.getrepr(style="native"))
