"""Requests to a store: what is sent again, when a caller stops waiting, and what an error says."""

from __future__ import annotations

import http.server
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from obstore.exceptions import GenericError

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.requests import Requests
from surge_dagster.engine.support.waiting import in_background
from tests.engine.store.object_server import BUCKET, Fault, ObjectServer, always

Operation = Callable[[ObjectStore], object]
NOWHERE = "http://127.0.0.1:1"


def store_at(
    endpoint: str, bucket: str = BUCKET, limits: ClientLimits | None = None
) -> ObjectStore:
    return open_object_store(
        f"s3://{bucket}/out",
        StorageOptions(endpoint=endpoint, access_key_id="k", secret_access_key="s"),
        limits=limits or ClientLimits(first_backoff_seconds=0.001),
    )


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


def test_missing_bucket_is_named_as_the_cause(
    object_server: ObjectServer, operation: Operation
) -> None:
    with pytest.raises(TransientError, match=r"404: NoSuchBucket.*Is there such a bucket"):
        operation(store_at(object_server.url, "another"))


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """Port of a server whose certificate is not trusted."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(
            name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1)
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = tmp_path / "certificate", tmp_path / "key"
    files[0].write_bytes(certificate.public_bytes(pem))
    files[1].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_untrusted_certificate_is_named_as_the_cause(tls_port: int, operation: Operation) -> None:
    with pytest.raises(TransientError, match="certificate is not valid for it, or is not trusted"):
        operation(store_at(f"https://127.0.0.1:{tls_port}"))


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [
        ("https://{host}", "tls: no secure connection.*begins with http://"),
        (
            "http://nowhere.invalid",
            "dns: the name of the host does not resolve.*Correct `endpoint`",
        ),
    ],
)
def test_endpoint_of_plain_http_or_unknown_name_is_named_as_the_cause(
    object_server: ObjectServer, operation: Operation, endpoint: str, error: str
) -> None:
    with pytest.raises(TransientError, match=error):
        operation(store_at(endpoint.format(host=object_server.url.removeprefix("http://"))))


def test_connection_that_is_lost_is_named_as_the_cause(object_server: ObjectServer) -> None:
    store = store_at(object_server.url)
    write(store)
    object_server.plan = always(Fault("truncate_down"), "GET")
    with pytest.raises(TransientError, match="reset: the connection was lost"):
        store.read_end("space/a.parquet", 100)


def test_store_that_reads_no_body_times_out() -> None:
    """The store reads less than is sent, and connecting may take longer than the test."""
    limits = ClientLimits(
        timeout_seconds=0.5, connect_timeout_seconds=3600.0, part_bytes=64 * 1024 * 1024
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        store = store_at(f"http://127.0.0.1:{listening.getsockname()[1]}", limits=limits)
        with (
            pytest.raises(TransientError, match="timeout: no answer in time"),
            store.create("space/a.parquet") as upload,
        ):
            upload.sink.write(bytes(32 * 1024 * 1024))
            upload.publish(lambda: None)


class TestProxies:
    """The test server stands for a proxy too: nothing listens at the store's endpoint."""

    @pytest.fixture(autouse=True)
    def no_proxy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    @pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
    def test_proxy_of_the_environment_is_used(
        self, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        monkeypatch.setenv(variable, object_server.url)
        store = store_at(NOWHERE)
        stored = write(store)
        assert list(store.list("space")) == [stored]

    def test_unreachable_proxy_is_reported_without_its_password(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", NOWHERE.replace("//", "//user:hunter2@"))
        with pytest.raises(TransientError, match="refused: no connection could be made") as caught:
            write(store_at("http://store.test"))
        assert "hunter2" not in str(caught.getrepr(style="native"))
