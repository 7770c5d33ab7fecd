"""Objects in an object store: real clients, a real server, and a proxy between them that breaks
requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.store import Store
from tests.engine.store.object_server import Fault, ObjectServer, always, on, open_bucket

PART = 64 * 1024
NAME = "space/a%20b~0.parquet"


@pytest.fixture(params=["s3", "gs"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


def open_store_of(server: ObjectServer, scheme: str = "s3", **limits: Any) -> ObjectStore:
    return open_bucket(server, scheme, "some/out", part_bytes=PART, **limits)


@pytest.fixture
def store(object_server: ObjectServer, scheme: str) -> ObjectStore:
    return open_store_of(object_server, scheme)


def put(
    store: ObjectStore, name: str, content: bytes, still_wanted: Callable[[], None] = lambda: None
) -> Any:
    with store.create(name) as upload:
        upload.sink.write(content)
        return upload.publish(still_wanted)


def names(store: Store, folder: str, *, deep: bool = False) -> list[str]:
    return sorted(found.name for found in store.list(folder, deep=deep))


def read(store: ObjectStore, name: str) -> bytes:
    with store.open(name) as file:
        return file.read()


class TestObjects:
    @pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART, 5 * PART + 7])
    def test_published_object_is_listed_with_its_etag_and_read_back(
        self, store: ObjectStore, object_server: ObjectServer, size: int
    ) -> None:
        content = bytes(range(256)) * (size // 256 + 1)
        stored = put(store, NAME, content[:size])
        assert size > PART or object_server.methods() == ["PUT"]
        assert list(store.list("space")) == [stored]
        assert stored.size == size
        assert read(store, NAME) == content[:size]
        assert list(object_server.objects()) == [f"some/out/{NAME}"]

    def test_object_is_invisible_before_it_is_published(
        self, store: ObjectStore, object_server: ObjectServer
    ) -> None:
        with store.create(NAME) as upload:
            for _ in range(20):
                upload.sink.write(b"x" * (PART // 3))
            assert object_server.requests("PUT"), "parts are sent while more is being written"
            assert object_server.objects() == {}
            upload.publish(lambda: None)
        assert list(object_server.objects()) == [f"some/out/{NAME}"]

    @pytest.mark.parametrize("size", [10, 3 * PART])
    def test_writer_that_fails_half_way_publishes_nothing(
        self, store: ObjectStore, object_server: ObjectServer, size: int
    ) -> None:
        with pytest.raises(RuntimeError, match="midway"), store.create(NAME) as upload:
            upload.sink.write(b"x" * size)
            raise RuntimeError("midway")
        assert object_server.objects() == {}

    @pytest.mark.parametrize("size", [10, 3 * PART])
    def test_result_that_is_no_longer_wanted_is_discarded(
        self, store: ObjectStore, size: int
    ) -> None:
        def object_to() -> None:
            raise TransientError("the source changed")

        put(store, NAME, b"old")
        with pytest.raises(TransientError, match="source changed"):
            put(store, NAME, b"x" * size, object_to)
        assert read(store, NAME) == b"old"

    def test_reading_a_footer_costs_one_request(
        self, store: ObjectStore, object_server: ObjectServer
    ) -> None:
        put(store, NAME, b"x" * PART * 4 + b"footer")
        object_server.log.clear()
        with store.open(NAME) as file:
            file.seek(-6, 2)
            assert file.read(6) == b"footer"
        assert object_server.methods() == ["GET"]

    def test_object_replaced_while_it_is_read_is_not_mixed(self, store: ObjectStore) -> None:
        put(store, NAME, b"old" * PART)
        with store.open(NAME) as file:
            put(store, NAME, b"new" * PART)
            with pytest.raises(TransientError, match="replaced or removed while it was read"):
                file.read()

    def test_object_is_opened_as_it_was_listed_or_not_at_all(self, store: ObjectStore) -> None:
        put(store, NAME, b"old")
        [listed] = store.list("space")
        with store.open(listed.name, listed) as file:
            assert file.read() == b"old"
        for content in (b"new", b"longer"):
            put(store, NAME, content)
            with pytest.raises(FileNotFoundError, match="another object stands in its place now"):
                store.open(listed.name, listed)
        store.delete(NAME)
        with pytest.raises(FileNotFoundError):
            store.open(listed.name, listed)

    def test_etag_without_quotes_in_the_listing_is_the_same(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Azure's listings do."""
        own = obstore.list_with_delimiter

        def listing(*arguments: Any, **settings: Any) -> Any:
            found: Any = own(*arguments, **settings)
            for meta in found["objects"]:
                assert meta["e_tag"].startswith('"')
                meta["e_tag"] = meta["e_tag"].strip('"')
            return found

        monkeypatch.setattr(obstore, "list_with_delimiter", listing)
        for content in (b"small", b"x" * 3 * PART):
            stored = put(store, NAME, content)
            assert list(store.list("space")) == [stored]
            assert store.read_end(NAME, 3).stored == stored

    def test_listing_leaves_out_hidden_names_at_any_depth(self, store: ObjectStore) -> None:
        for name in (
            "space/a",
            "space/in/b",
            "space/.hidden/c",
            "space/.d",
            ".staged/e/f",
            "other/g",
            "top",
        ):
            put(store, name, b"x")

        assert store.folders() == ["other", "space"]
        assert names(store, "") == ["top"]
        assert names(store, "space") == ["space/a"]
        assert names(store, "space", deep=True) == ["space/a", "space/in/b"]
        assert names(store, ".staged", deep=True) == [".staged/e/f"]
        assert names(store, "sp", deep=True) == names(store, "none") == []

    def test_missing_object_cannot_be_opened_and_can_be_deleted(self, store: ObjectStore) -> None:
        put(store, NAME, b"x")
        store.delete(NAME)
        store.delete(NAME)
        with pytest.raises(FileNotFoundError):
            store.open(NAME)
        assert list(store.list("space")) == []

    def test_azure_protocol_works_against_the_memory_store(self) -> None:
        """Conditions of the memory store are etags, as Azure's are."""
        opened = open_object_store("memory://m/some/out", limits=ClientLimits(part_bytes=PART))
        for content in (b"", b"first", b"large" * PART, b"second"):
            stored = put(opened, NAME, content)
            assert list(opened.list("space")) == [stored]
            assert read(opened, NAME) == content
        assert opened.folders() == ["space"]
        with opened.create("space/b") as upload:
            upload.sink.write(b"x" * 3 * PART)
        assert names(opened, "space") == [NAME]
        opened.prepare("space")
        opened.sweep("space")


EACH_FAULT = [Fault("status"), Fault("status", 500), Fault("status", 429)]
EACH_FAULT += [Fault("reset_before"), Fault("reset_after"), Fault("truncate_up")]
IN_PARTS = 3 * PART + 1


class TestFaults:
    @pytest.mark.parametrize(
        "fault", EACH_FAULT, ids=lambda fault: f"{fault.action}-{fault.status}"
    )
    def test_whole_object_survives_two_faults_in_a_row(
        self, store: ObjectStore, object_server: ObjectServer, fault: Fault
    ) -> None:
        object_server.plan = on("PUT", "space", fault, fault)
        stored = put(store, NAME, b"content")
        assert list(store.list("space")) == [stored]
        assert object_server.content(f"some/out/{NAME}") == b"content"
        assert object_server.injected.total() == 2

    @pytest.mark.parametrize(
        "request_", [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId")]
    )
    def test_multipart_upload_survives_a_busy_store_in_each_of_its_steps(
        self, store: ObjectStore, object_server: ObjectServer, request_: tuple[str, str]
    ) -> None:
        object_server.plan = on(*request_, Fault("status", 503))
        content = bytes(range(256)) * (IN_PARTS // 256)
        stored = put(store, NAME, content)
        assert object_server.injected.total() == 1
        assert list(store.list("space")) == [stored]
        assert object_server.content(f"some/out/{NAME}") == content

    @pytest.mark.parametrize("before", [None, b"o" * IN_PARTS], ids=["new", "replaced"])
    def test_upload_that_another_process_aborted_fails_only_its_partition(
        self, store: ObjectStore, object_server: ObjectServer, before: bytes | None
    ) -> None:
        if before is not None:
            put(store, NAME, before)
        objects = object_server.objects()
        object_server.plan = always(Fault("status", 404, code="NoSuchUpload"), "POST", "uploadId")

        with pytest.raises(TransientError, match="completed or aborted already") as failed:
            put(store, NAME, b"n" * IN_PARTS)

        assert not isinstance(failed.value, StoreUnavailable)
        assert object_server.objects() == objects

    @pytest.mark.parametrize("method", ["GET", "PUT"])
    def test_store_that_stalls_is_given_up_and_tried_again(
        self, object_server: ObjectServer, scheme: str, method: str
    ) -> None:
        """The proxy holds the request until the client has given up, and then passes it to the
        store."""
        store = open_store_of(object_server, scheme, timeout_seconds=0.5)
        object_server.plan = on(method, "", Fault("stall"))
        put(store, NAME, b"content")
        assert read(store, NAME) == b"content"

    def test_killed_upload_leaves_no_object(self, object_server: ObjectServer, scheme: str) -> None:
        command = [sys.executable, "-c", DIE_IN_AN_UPLOAD, object_server.url, scheme]
        assert subprocess.run(command, timeout=60, cwd=Path(__file__).parents[3]).returncode == -9
        assert len(object_server.unfinished()) == 1, "the bucket's lifecycle rule removes it"
        assert object_server.objects() == {}


DIE_IN_AN_UPLOAD = """
import os, signal, sys
from types import SimpleNamespace
from tests.engine.store.object_server import open_bucket
upload = open_bucket(SimpleNamespace(url=sys.argv[1]), sys.argv[2]).create("space/a.parquet")
upload.sink.write(b"x" * 200_000)
upload.sink.write(b"x" * 200_000)
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestTwoWriters:
    """One has read the old source, the other the new one; the object of the new source stays, in
    either order."""

    @pytest.mark.parametrize("size", [10, IN_PARTS], ids=["whole", "in parts"])
    @pytest.mark.parametrize("first", ["old", "new"])
    @pytest.mark.parametrize("before", [None, b"earlier"], ids=["nothing there", "something there"])
    def test_writer_with_the_newer_source_wins(
        self, object_server: ObjectServer, scheme: str, size: int, first: str, before: bytes | None
    ) -> None:
        setter = open_store_of(object_server, scheme)
        if before is not None:
            put(setter, NAME, before)
        version = "old"

        def require(wanted: str) -> Callable[[], None]:
            def still_wanted() -> None:
                if version != wanted:
                    raise TransientError(f"the source is {version} now")

            return still_wanted

        old = open_store_of(object_server, scheme)
        new = open_store_of(object_server, scheme)
        list(old.list("space"))
        content = b"n" * size
        if first == "old":
            put(old, NAME, b"o" * size, require("old"))
            version = "new"
            put(new, NAME, content, require("new"))
        else:
            with (
                pytest.raises(TransientError, match="the source is new now"),
                old.create(NAME) as late,
            ):
                late.sink.write(b"o" * size)

                def overtaken() -> None:
                    nonlocal version
                    if version == "old":  # the other writer publishes right after the last check
                        version = "new"
                        put(new, NAME, content, require("new"))
                        return
                    require("old")()

                late.publish(overtaken)
        assert object_server.content(f"some/out/{NAME}") == content


class TestOpening:
    @pytest.mark.parametrize(
        ("url", "options", "reason"),
        [
            ("s3:///out", StorageOptions(), "names no bucket"),
            ("s3://[bad/x", StorageOptions(), "is no URL"),
            ("file://[bad/x", StorageOptions(), "is no URL"),
            ("s3://bucket/out", StorageOptions(access_key_id="mine"), "give both or neither"),
        ],
    )
    def test_incomplete_url_or_access_key_is_refused(
        self, url: str, options: StorageOptions, reason: str
    ) -> None:
        with pytest.raises(ConfigError, match=reason):
            open_store(url, options)

    @pytest.mark.parametrize(
        "url",
        [
            "s3://key:hunter2@bucket/out",
            "az://c/out?sig=hunter2",
            "https://user:hunter2@host/out?sig=hunter2",
        ],
    )
    def test_secret_in_a_url_is_refused_and_not_shown(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize(
        ("scheme", "remedy"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION")]
    )
    def test_missing_credentials_are_reported_before_work_starts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, remedy: str
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(ConfigError, match=remedy):
            open_store(f"{scheme}://bucket/out")
