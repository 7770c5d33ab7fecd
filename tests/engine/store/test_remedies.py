"""What a store refuses for good is asked once, and the error says what to do about that very refusal."""

from __future__ import annotations

import http.server
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.storage_options import StorageOptions
from tests.engine.store.object_server import BUCKET, Fault, ObjectServer, always

Ask = Callable[[ObjectStore], object]


def store_at(endpoint: str, bucket: str = BUCKET) -> ObjectStore:
    return open_object_store(
        f"s3://{bucket}/out",
        StorageOptions(endpoint=endpoint, access_key_id="k", secret_access_key="s"),
        retrier=lambda where: Retrier(where, sleep=lambda _: None),
    )


def write(store: ObjectStore) -> object:
    with store.create("space/a.parquet") as upload:
        upload.write(b"content")
        return upload.publish(lambda: None)


@pytest.fixture(params=[write, lambda store: list(store.list("space"))], ids=["write", "list"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """A request of each of the two clients."""
    return request.param


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (301, "PermanentRedirect", "another region: name that one"),
        (400, "AuthorizationHeaderMalformed", "another region: name that one"),
        (400, "ExpiredToken", "out of date or lack a right. Give others"),
        (403, "AccessDenied", "lack a right. Give others"),
        (403, "RequestTimeTooSkewed", "clock is wrong: set it"),
        (507, "InsufficientStorage", "full: make room"),
    ],
)
def test_a_refusal_says_what_mends_it(
    object_server: ObjectServer, ask: Ask, status: int, code: str, remedy: str
) -> None:
    object_server.plan = always(Fault("status", status, code=code))
    store = store_at(object_server.url)
    with pytest.raises(TransientError, match=f"{status}: {code}.*one attempt.*{remedy}"):
        ask(store)
    assert (len(object_server.log), store.retries) == (1, {})


def test_a_bucket_that_is_not_there_is_named_as_the_fault(object_server: ObjectServer, ask: Ask) -> None:
    with pytest.raises(TransientError, match=r"404: NoSuchBucket.*one attempt.*Is there such a bucket"):
        ask(store_at(object_server.url, "another"))


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """Of a server whose certificate nobody trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = tmp_path / "certificate", tmp_path / "key"
    files[0].write_bytes(certificate.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
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


def test_a_certificate_that_nobody_trusts_is_looked_at_once(tls_port: int, ask: Ask) -> None:
    store = store_at(f"https://127.0.0.1:{tls_port}")
    with pytest.raises(TransientError, match=r"one attempt.*certificate is not valid for it, or is not trusted here"):
        ask(store)
    assert store.retries == {}


def test_plain_http_behind_an_https_endpoint_is_guessed(object_server: ObjectServer, ask: Ask) -> None:
    with pytest.raises(TransientError, match=r"tls: no secure connection.*begins with http://"):
        ask(store_at(object_server.url.replace("http://", "https://")))
