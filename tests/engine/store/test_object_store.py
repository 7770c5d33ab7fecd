"""Files in an object store: real clients, a real server, and a front that breaks requests between them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.storage_options import StorageOptions
from tests.engine.store.object_server import BUCKET, Fault, ObjectServer, always, on

PART = 64 * 1024
NAME = "space/a%20b~0.parquet"
Opener = Callable[..., ObjectStore]


@pytest.fixture(params=["s3", "gs"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


def options_for(server: ObjectServer, **changes: Any) -> StorageOptions:
    given = {
        "endpoint": server.url,
        "access_key_id": "AKIATESTKEY",
        "secret_access_key": "secret-of-the-test",
        "token": "token-of-the-test",
        "timeout_seconds": 5.0,
        "part_bytes": PART,
    }
    return StorageOptions(**(given | changes))


def open_bucket(server: ObjectServer, scheme: str = "s3", **changes: Any) -> ObjectStore:
    """The store; it never waits before it tries again."""
    return open_object_store(
        f"{scheme}://{BUCKET}/some/out",
        options_for(server, **changes),
        retrier=lambda where: Retrier(where, sleep=lambda _: None),
    )


@pytest.fixture
def store(object_server: ObjectServer, scheme: str) -> ObjectStore:
    return open_bucket(object_server, scheme)


def put(store: ObjectStore, name: str, content: bytes, still_wanted: Callable[[], None] = lambda: None) -> Any:
    with store.create(name) as upload:
        upload.sink.write(content)
        return upload.publish(still_wanted)


def read(store: ObjectStore, name: str) -> bytes:
    with store.open(name) as file:
        return file.read()


class TestObjects:
    @pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART, 5 * PART + 7])
    def test_what_is_published_is_listed_with_the_tag_of_its_receipt_and_read_back(
        self, store: ObjectStore, object_server: ObjectServer, size: int
    ) -> None:
        content = bytes(range(256)) * (size // 256 + 1)
        stored = put(store, NAME, content[:size])
        assert list(store.list("space")) == [stored]
        assert stored.size == size
        assert read(store, NAME) == content[:size]
        assert list(object_server.objects()) == [f"some/out/{NAME}"]
        assert object_server.unfinished() == []
        assert store.retries == {}

    def test_what_fits_in_a_part_is_one_request(self, store: ObjectStore, object_server: ObjectServer) -> None:
        put(store, NAME, b"x" * PART)
        assert [method for method, _, _ in object_server.log] == ["PUT"]

    def test_nothing_is_visible_before_it_is_published(self, store: ObjectStore, object_server: ObjectServer) -> None:
        with store.create(NAME) as upload:
            for _ in range(20):
                upload.sink.write(b"x" * (PART // 3))
            assert object_server.requests("PUT"), "parts are sent while more is being written"
            assert object_server.objects() == {}
            upload.publish(lambda: None)
        assert list(object_server.objects()) == [f"some/out/{NAME}"]

    @pytest.mark.parametrize("size", [10, 3 * PART])
    def test_leaving_without_publishing_leaves_nothing(
        self, store: ObjectStore, object_server: ObjectServer, size: int
    ) -> None:
        with pytest.raises(RuntimeError, match="midway"), store.create(NAME) as upload:
            upload.sink.write(b"x" * size)
            raise RuntimeError("midway")
        assert (object_server.objects(), object_server.unfinished()) == ({}, [])

    @pytest.mark.parametrize("size", [10, 3 * PART])
    def test_a_result_that_is_no_longer_wanted_is_thrown_away(
        self, store: ObjectStore, object_server: ObjectServer, size: int
    ) -> None:
        def object_to() -> None:
            raise TransientError("the source changed")

        put(store, NAME, b"old")
        with pytest.raises(TransientError, match="source changed"):
            put(store, NAME, b"x" * size, object_to)
        assert read(store, NAME) == b"old"
        assert object_server.unfinished() == []

    def test_a_footer_costs_one_request(self, store: ObjectStore, object_server: ObjectServer) -> None:
        put(store, NAME, b"x" * PART * 4 + b"footer")
        object_server.log.clear()
        with store.open(NAME) as file:
            file.seek(-6, 2)
            assert file.read(6) == b"footer"
        assert [method for method, _, _ in object_server.log] == ["GET"]

    def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(self, store: ObjectStore) -> None:
        put(store, NAME, b"old" * PART)
        with store.open(NAME) as file:
            put(store, NAME, b"new" * PART)
            with pytest.raises(TransientError, match="replaced or removed while it was read"):
                file.read()

    def test_an_object_is_opened_as_it_was_listed_or_not_at_all(self, store: ObjectStore) -> None:
        put(store, NAME, b"old")
        [listed] = store.list("space")
        with store.open_listed(listed) as file:
            assert file.read() == b"old"
        for content in (b"new", b"longer"):
            put(store, NAME, content)
            with pytest.raises(FileNotFoundError, match="another object stands in its place now"):
                store.open_listed(listed)
        store.delete(NAME)
        with pytest.raises(FileNotFoundError):
            store.open_listed(listed)

    def test_folders_hidden_names_and_depth(self, store: ObjectStore) -> None:
        for name in ("space/a", "space/in/b", "space/.hidden/c", "space/.d", ".staged/e/f", "other/g", "top"):
            put(store, name, b"x")

        def names(folder: str, *, deep: bool = False) -> list[str]:
            return sorted(found.name for found in store.list(folder, deep=deep))

        assert store.folders() == ["other", "space"]
        assert names("") == ["top"]
        assert names("space") == ["space/a"]
        assert names("space", deep=True) == ["space/a", "space/in/b"]
        assert names(".staged", deep=True) == [".staged/e/f"]
        assert names("sp", deep=True) == names("none") == []

    def test_a_missing_object_cannot_be_opened_and_can_be_deleted(self, store: ObjectStore) -> None:
        put(store, NAME, b"x")
        store.delete(NAME)
        store.delete(NAME)
        with pytest.raises(FileNotFoundError):
            store.open(NAME)
        assert list(store.list("space")) == []

    def test_stores_that_only_obstore_speaks_to(self) -> None:
        """Its store in memory stands for Azure's: whole objects on a condition, large ones through its own writer."""
        opened = open_object_store("memory://m/some/out", StorageOptions(part_bytes=PART))
        for content in (b"", b"first", b"large" * PART, b"second"):
            stored = put(opened, NAME, content)
            assert list(opened.list("space")) == [stored]
            assert read(opened, NAME) == content
        assert opened.folders() == ["space"]
        with opened.create("space/b") as upload:
            upload.sink.write(b"x" * 3 * PART)
        assert [found.name for found in opened.list("space")] == [NAME]
        opened.prepare("space")
        opened.sweep("space")


EACH_FAULT = [
    Fault("status", 503),
    Fault("status", 500),
    Fault("status", 429, {"Retry-After": "3"}),
    Fault("reset_before"),
    Fault("reset_after"),
    Fault("truncate_up"),  # what arrives is not what its MD5 says
    Fault("status", 400, code="IncompleteBody"),
]
IN_PARTS = 3 * PART + 1


class TestFaults:
    @pytest.mark.parametrize("fault", EACH_FAULT, ids=lambda fault: f"{fault.action}-{fault.status}-{fault.code}")
    def test_a_whole_object_survives_two_in_a_row(
        self, store: ObjectStore, object_server: ObjectServer, fault: Fault
    ) -> None:
        object_server.plan = on("PUT", NAME.split("%")[0], fault, fault)
        stored = put(store, NAME, b"content")
        assert list(store.list("space")) == [stored]
        assert object_server.content(f"some/out/{NAME}") == b"content"
        # What was stored although its answer was lost is found to be there, and is not refused as another's.
        assert sum(store.retries.values()) == object_server.injected.total() == 2

    @pytest.mark.parametrize("fault", EACH_FAULT, ids=lambda fault: f"{fault.action}-{fault.status}-{fault.code}")
    @pytest.mark.parametrize("request_", [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId")])
    def test_an_upload_in_parts_survives_one_in_each_of_its_steps(
        self, store: ObjectStore, object_server: ObjectServer, fault: Fault, request_: tuple[str, str]
    ) -> None:
        object_server.plan = on(*request_, fault)
        content = bytes(range(256)) * (IN_PARTS // 256)
        stored = put(store, NAME, content)
        assert list(store.list("space")) == [stored]
        assert object_server.content(f"some/out/{NAME}") == content
        assert object_server.unfinished() == [], "an upload whose id was lost on the way is found and aborted"
        assert sum(store.retries.values()) == object_server.injected.total() == 1

    @pytest.mark.parametrize("method", ["GET", "PUT"])
    def test_a_store_that_stalls_is_not_waited_for(self, object_server: ObjectServer, scheme: str, method: str) -> None:
        """The front holds the request until the client has gone, and then lets the store have it."""
        store = open_bucket(object_server, scheme, timeout_seconds=0.5)
        object_server.plan = on(method, "", Fault("stall"))
        put(store, NAME, b"content")
        assert read(store, NAME) == b"content"
        assert store.retries == {"timeout": 1}

    @pytest.mark.parametrize("action", ["truncate_down", "reset_before", "status"])
    def test_reading_survives_two_in_a_row(self, store: ObjectStore, object_server: ObjectServer, action: Any) -> None:
        content = bytes(range(256)) * 8192
        put(store, NAME, content)
        object_server.plan = on("GET", "space", *[Fault(action)] * 2)
        assert len(list(store.list("space"))) == 1
        object_server.plan = on("GET", "0", *[Fault(action)] * 2)
        assert read(store, NAME) == content
        assert sum(store.retries.values()) == object_server.injected.total() == 4

    def test_the_wait_that_the_store_asks_for_is_kept(self, object_server: ObjectServer, scheme: str) -> None:
        waits: list[float] = []
        store = open_object_store(
            f"{scheme}://{BUCKET}/out",
            options_for(object_server),
            retrier=lambda where: Retrier(where, sleep=waits.append, jitter=lambda: 0.0),
        )
        object_server.plan = on("PUT", "", Fault("status", 429, {"Retry-After": "11"}))
        put(store, NAME, b"content")
        assert waits == [11.0]
        assert store.retries == {"429": 1}

    @pytest.mark.parametrize("request_", [("PUT", "partNumber=2"), ("POST", "uploadId")])
    def test_an_upload_that_fails_for_good_leaves_nothing(
        self, store: ObjectStore, object_server: ObjectServer, request_: tuple[str, str]
    ) -> None:
        object_server.plan = always(Fault("status", 503), *request_)
        with pytest.raises(TransientError, match=r"failed \(503: SlowDown\) after 3 attempts"):
            put(store, NAME, b"x" * IN_PARTS)
        assert (object_server.objects(), object_server.unfinished()) == ({}, [])

    def test_a_store_that_is_down_says_so(self, store: ObjectStore, object_server: ObjectServer) -> None:
        object_server.plan = always(Fault("reset_before"))
        for _ in range(3):
            with pytest.raises(TransientError):
                put(store, NAME, b"x")
        with pytest.raises(StoreUnavailable, match="4 requests in a row came to nothing"):
            put(store, NAME, b"x")

    @pytest.mark.parametrize("size", [10, IN_PARTS], ids=["whole", "in parts"])
    def test_a_store_that_stores_nothing_is_down_whatever_else_it_answers(
        self, store: ObjectStore, object_server: ObjectServer, size: int
    ) -> None:
        put(store, NAME, b"old")
        assert len(list(store.list("space"))) == 1, "it is known, and is looked at before it is replaced"
        object_server.plan = always(Fault("status", 403), "PUT")
        for _ in range(3):
            with pytest.raises(TransientError) as refused:
                put(store, NAME, b"x" * size)
            assert not isinstance(refused.value, StoreUnavailable)
        with pytest.raises(StoreUnavailable, match="4 requests in a row came to nothing"):
            put(store, NAME, b"x" * size)
        assert read(store, NAME) == b"old"
        assert object_server.unfinished() == []

    def test_what_is_not_allowed_is_asked_once(self, store: ObjectStore, object_server: ObjectServer) -> None:
        object_server.plan = always(Fault("status", 403))
        with pytest.raises(TransientError, match=r"403.*credentials"):
            put(store, NAME, b"x")
        with pytest.raises(TransientError, match=r"403.*credentials"):
            list(store.list("space"))
        assert (len(object_server.log), store.retries) == (2, {})


class TestTwoWriters:
    """One has read the old source, the other the new one; whoever finishes first, the new one's file stays."""

    @pytest.mark.parametrize("size", [10, IN_PARTS], ids=["whole", "in parts"])
    @pytest.mark.parametrize("first", ["old", "new"])
    @pytest.mark.parametrize("before", [None, b"earlier"], ids=["nothing there", "something there"])
    def test_the_newer_source_wins(
        self, object_server: ObjectServer, scheme: str, size: int, first: str, before: bytes | None
    ) -> None:
        setter = open_bucket(object_server, scheme)
        if before is not None:
            put(setter, NAME, before)
        version = "old"

        def require(wanted: str) -> Callable[[], None]:
            def still_wanted() -> None:
                if version != wanted:
                    raise TransientError(f"the source is {version} now")

            return still_wanted

        old, new = open_bucket(object_server, scheme), open_bucket(object_server, scheme)
        list(old.list("space"))
        content = b"n" * size
        if first == "old":
            put(old, NAME, b"o" * size, require("old"))
            version = "new"
            put(new, NAME, content, require("new"))
        else:
            with pytest.raises(TransientError, match="the source is new now"), old.create(NAME) as late:
                late.sink.write(b"o" * size)

                def overtaken() -> None:
                    nonlocal version
                    if version == "old":  # the last look was good, and what it saw is no longer so
                        version = "new"
                        put(new, NAME, content, require("new"))
                        return
                    require("old")()

                late.publish(overtaken)
        assert object_server.content(f"some/out/{NAME}") == content
        assert object_server.unfinished() == []

    def test_many_writers_at_once_leave_one_whole_object(self, object_server: ObjectServer, scheme: str) -> None:
        outcomes: list[Any] = []

        def write(number: int) -> None:
            try:
                outcomes.append(put(open_bucket(object_server, scheme), NAME, bytes([number]) * 1000))
            except TransientError as error:
                outcomes.append(error)

        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        content = object_server.content(f"some/out/{NAME}")
        assert len(content) == 1000
        assert len(set(content)) == 1
        assert len(outcomes) == 4


DIE_IN_AN_UPLOAD = """
import os, signal, sys
from surge_dagster.engine.store import StorageOptions, open_store
store = open_store(sys.argv[1], StorageOptions(endpoint=sys.argv[2], token="t", part_bytes=65536))
upload = store.create("space/a.parquet")
upload.sink.write(b"x" * 200_000)
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestUnfinishedUploads:
    def test_those_of_dead_writers_are_removed_and_young_ones_kept(
        self, object_server: ObjectServer, scheme: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        command = [sys.executable, "-c", DIE_IN_AN_UPLOAD, f"{scheme}://{BUCKET}/some/out", object_server.url]
        assert subprocess.run(command, timeout=60).returncode == -9
        assert object_server.unfinished() == ["some/out/space/a.parquet"]
        open_bucket(object_server, scheme).sweep("space")
        assert len(object_server.unfinished()) == 1, "it is young, and its writer may live"
        patient = open_bucket(object_server, scheme, abandoned_after_seconds=-1.0)
        patient.sweep("other")
        assert len(object_server.unfinished()) == 1, "it is another folder's"
        patient.sweep("space")
        assert object_server.unfinished() == []

    def test_below_a_folder_too(self, object_server: ObjectServer, scheme: str) -> None:
        store = open_bucket(object_server, scheme, abandoned_after_seconds=-1.0)
        with store.create(".hidden/a/b/c.parquet") as upload:
            upload.sink.write(b"x" * IN_PARTS)
            store.sweep(".hidden/a")
            assert object_server.unfinished() == []

    @pytest.mark.parametrize("date", ["", "soon", "Sat, 21 Nov 2026 09:32:44 -0000"])
    def test_those_whose_age_the_store_does_not_say_are_left_alone(
        self, object_server: ObjectServer, date: str
    ) -> None:
        object_server.listing_of_uploads = lambda headers, content: (headers | {"Date": date}, content)
        self._is_left_alone(object_server)

    @pytest.mark.parametrize("began", ["", "soon", "2011-11-10T20:48:33", "9999-12-31T23:59:59Z"])
    def test_nor_are_those_that_began_nobody_knows_when(self, object_server: ObjectServer, began: str) -> None:
        object_server.listing_of_uploads = lambda headers, content: (
            headers,
            re.sub(rb"<Initiated>[^<]*", b"<Initiated>" + began.encode(), content),
        )
        self._is_left_alone(object_server)

    @pytest.mark.parametrize("key", ["", "some/other/a.parquet"])
    def test_a_store_that_names_other_uploads_than_were_asked_for_is_not_believed(
        self, object_server: ObjectServer, key: str
    ) -> None:
        object_server.listing_of_uploads = lambda headers, content: (
            headers,
            re.sub(rb"<Key>[^<]*", b"<Key>" + key.encode(), content),
        )
        self._is_left_alone(object_server)

    @pytest.mark.parametrize("markers", [b"", b"<NextKeyMarker>a</NextKeyMarker>"])
    def test_a_listing_that_never_ends_ends(self, object_server: ObjectServer, markers: bytes) -> None:
        object_server.listing_of_uploads = lambda headers, content: (
            headers,
            content.replace(b"<IsTruncated>false</IsTruncated>", b"<IsTruncated>true</IsTruncated>" + markers),
        )
        open_bucket(object_server).sweep("space")
        assert len(object_server.requests("GET")) == (2 if markers else 1)

    @staticmethod
    def _is_left_alone(server: ObjectServer) -> None:
        store = open_bucket(server, abandoned_after_seconds=-1.0)
        with store.create("space/a.parquet") as upload:
            upload.sink.write(b"x" * IN_PARTS)
            store.sweep("space")
            assert server.unfinished() == ["some/out/space/a.parquet"]
            upload.publish(lambda: None)


class TestOpening:
    @pytest.mark.parametrize(
        "url", ["s3://key:hunter2@bucket/out", "az://c/out?sig=hunter2", "https://user:hunter2@host/out?sig=hunter2"]
    )
    def test_a_secret_in_a_url_is_refused_and_not_shown(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)

    def test_a_bucket_must_be_named(self) -> None:
        with pytest.raises(ConfigError, match="names no bucket"):
            open_store("s3:///out")

    @pytest.mark.parametrize("url", ["s3://[bad/x", "file://[bad/x"])
    def test_what_is_no_url_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="is no URL"):
            open_store(url)

    def test_half_of_a_pair_of_keys_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="give both or neither"):
            open_store("s3://bucket/out", StorageOptions(access_key_id="mine"))

    @pytest.mark.parametrize(("scheme", "remedy"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION")])
    def test_missing_credentials_are_told_before_work_starts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, remedy: str
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(ConfigError, match=remedy):
            open_store(f"{scheme}://bucket/out")

    def test_a_local_output_loads_no_client_of_a_cloud(self) -> None:
        code = (
            "import sys; from surge_dagster.engine.store import open_store; open_store('/tmp'); "
            "import surge_dagster.engine.run; "
            "sys.exit(any(name.split('.')[0] in ('obstore', 'botocore') for name in sys.modules))"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
