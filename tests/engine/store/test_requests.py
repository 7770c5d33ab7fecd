"""Requests to a store: what is sent again, when a caller stops waiting, and what an error says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from obstore.exceptions import GenericError

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.object_client import ClientLimits
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.requests import Requests
from surge_dagster.engine.support.waiting import in_background
from tests.engine.store.object_server import BUCKET, Fault, ObjectServer, always, storage_options

Operation = Callable[[ObjectStore], object]


def store_at(endpoint: str) -> ObjectStore:
    limits = ClientLimits(first_backoff_seconds=0.001)
    return open_object_store(f"s3://{BUCKET}/out", storage_options(endpoint), limits=limits)


def write(store: ObjectStore) -> object:
    with store.create("space/a.parquet") as upload:
        upload.sink.write(b"content")
        return upload.publish(lambda: None)


def read(store: ObjectStore) -> object:
    return store.read_end("space/a.parquet", 100)


def list_folder(store: ObjectStore) -> object:
    return list(store.list("space"))


def delete(store: ObjectStore) -> object:
    return store.delete("space/a.parquet")


@pytest.fixture(params=[write, list_folder], ids=["write", "list"])
def operation(request: pytest.FixtureRequest) -> Operation:
    return request.param


@pytest.mark.parametrize("each", [write, read, list_folder, delete])
@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (301, "PermanentRedirect", "another region. Set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "another region. Set AWS_REGION"),
        (400, "ExpiredToken", "expired or lack a right. Provide others"),
        (401, "Unauthorized", "expired or lack a right. Provide others"),
        (403, "InvalidAccessKeyId", "missing, wrong, expired"),
        (403, "SignatureDoesNotMatch", "missing, wrong, expired"),
        (403, "RequestTimeTooSkewed", "clock is wrong: set it"),
        (404, "NoSuchBucket", "Is there such a bucket"),
        (429, "SlowDown", "Run again when the store answers"),
        (503, "SlowDown", "Run again when the store answers"),
        (507, "InsufficientStorage", "full: make room"),
    ],
)
def test_error_that_concerns_every_object_ends_the_run(
    object_server: ObjectServer, each: Operation, status: int, code: str, remedy: str
) -> None:
    object_server.plan = always(Fault("status", status, code=code))

    with pytest.raises(StoreUnavailable, match=f"{status}: {code}.*{remedy}"):
        each(store_at(object_server.url))

    assert len(object_server.log) == (3 if status == 429 or status >= 500 else 1)


@pytest.mark.parametrize(
    ("method", "each"),
    [("GET", read), ("PUT", write), ("HEAD", write), ("POST", delete)],
    ids=["GET", "PUT", "HEAD", "POST"],
)
@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [(403, "AccessDenied", "lack a right"), (400, "InvalidRequest", "Run again")],
)
def test_refusal_of_one_object_does_not_end_the_run(
    object_server: ObjectServer, method: str, each: Operation, status: int, code: str, remedy: str
) -> None:
    store = store_at(object_server.url)
    write(store)
    object_server.plan = always(Fault("status", status, code=code), method)

    with pytest.raises(TransientError, match=f"{status}.*{remedy}") as refused:
        each(store)

    assert not isinstance(refused.value, StoreUnavailable)


def test_deletion_refused_with_status_200_does_not_end_the_run() -> None:
    def refused() -> None:
        raise GenericError("DeleteObjects request failed for key a: no (code: AccessDenied)")

    with pytest.raises(TransientError, match=r"DELETE a failed \(AccessDenied\)") as failed:
        Requests("s3://b").send("DELETE a", refused)

    assert not isinstance(failed.value, StoreUnavailable)


def test_refused_listing_ends_the_run(object_server: ObjectServer) -> None:
    object_server.plan = always(Fault("status", 403, code="AccessDenied"))

    with pytest.raises(StoreUnavailable, match=r"LIST .*403: AccessDenied.*lack a right"):
        list_folder(store_at(object_server.url))


def test_request_that_gets_no_answer_is_given_up_when_the_run_is_over() -> None:
    over = threading.Event()
    opened = threading.Event()
    requests = Requests("s3://b").until(over).until(threading.Event())

    def silent() -> None:
        over.set()
        opened.wait(60)

    with pytest.raises(Cancelled):
        in_background(lambda: requests.send("PUT a", silent), "run").result(60)
    assert not opened.is_set()
    opened.set()


def test_run_that_is_over_sends_no_further_request() -> None:
    over = threading.Event()
    over.set()
    sent: list[int] = []

    with pytest.raises(Cancelled):
        Requests("s3://b").until(over).send("PUT a", lambda: sent.append(1))

    assert not sent


def test_runs_that_share_a_store_end_on_their_own() -> None:
    requests = Requests("s3://b")
    over = threading.Event()
    over.set()
    requests.until(over)

    assert requests.until(threading.Event()).send("PUT a", lambda: "done") == "done"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Connect, InvalidCertificate(UnknownIssuer)", "is not valid for it, or is not tr"),
        ("kind: Connect, InvalidMessage(InvalidContentType)", "tls: .*begins with http://"),
        ('kind: Connect, ConnectError("dns error", failed)', "dns: .*Correct `endpoint`"),
        ('kind: Connect, ConnectError("tcp connect error")', "refused: no connection"),
        ("kind: Timeout, source: TimedOut", "timeout: no answer in time"),
        ("kind: Interrupted, kind: ConnectionReset", "reset: the connection was lost"),
    ],
)
def test_request_without_an_answer_is_explained_by_the_words_of_obstore(
    text: str, words: str
) -> None:
    def lost() -> None:
        raise GenericError(f"Error performing GET https://127.0.0.1 - HTTP error: {text}")

    with pytest.raises(StoreUnavailable, match=words):
        Requests("s3://b").send("GET a", lost)


def test_unreachable_proxy_is_reported_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://user:hunter2@127.0.0.1:1")
    with pytest.raises(TransientError, match="refused: no connection could be made") as caught:
        write(store_at("http://store.test"))
    assert "hunter2" not in str(caught.getrepr(style="native"))
