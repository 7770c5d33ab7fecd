"""An encoder behind HTTPS, with HTTP/2 and a certificate authority of its own."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.endpoint.fault_server import MODEL, FaultServer
from tests.extras import require

require("dev", "hypercorn", "cryptography")

pytestmark = pytest.mark.usefixtures("own_cache")


@dataclass(slots=True)
class TlsServer:
    """A running server.

    Attributes:
        certificate: that signs itself.
        versions: of HTTP, by requests.
        clients: addresses that requests came from, one of each connection.
    """

    url: str
    certificate: Path
    state: FaultServer
    versions: Counter[str] = field(default_factory=Counter)
    clients: set[Any] = field(default_factory=set)


def _write_certificate(folder: Path) -> None:
    """Write key.pem and cert.pem of 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(encoding))
    (folder / "key.pem").write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    """Hypercorn with a certificate that nothing trusts yet."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    _write_certificate(tmp_path)
    running = TlsServer("", tmp_path / "cert.pem", FaultServer())

    async def answer(request: Request) -> Response:
        running.versions[request.scope["http_version"]] += 1
        running.clients.add(request.scope["client"])
        return await running.state.answer(request)

    app: Any = Starlette(routes=[Route("/v1/embeddings", answer, methods=["POST"])])
    config = Config()
    config.certfile = str(tmp_path / "cert.pem")
    config.keyfile = str(tmp_path / "key.pem")
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    running.url = "https://{}:{}/v1".format(*listener.getsockname())
    config.bind = [f"fd://{listener.detach()}"]  # the server closes it
    work = serve(app, config, shutdown_trigger=ended.wait)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()
    try:
        yield running
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def _spec(server: TlsServer) -> EncodingSpec:
    endpoint = Endpoint(url=server.url, batch=4, concurrency=8, patience_seconds=20.0)
    return EncodingSpec(MODEL, endpoint=endpoint)


def test_requests_share_one_connection_of_http_2(
    server: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
    texts = [f"text {row}" for row in range(200)]

    with EncoderPool(_spec(server)) as pool:
        pool.start()
        server.clients.clear()
        vectors = pool.vectors(pa.array(texts, pa.large_string()))  # pyright: ignore

    assert np.array_equal(vectors, server.state.vectors(texts))
    assert set(server.versions) == {"2"}
    assert len(server.clients) == 1


def test_certificate_that_is_not_trusted_is_refused_at_once(server: TlsServer) -> None:
    with pytest.raises(ConfigError, match=r"certificate .* SSL_CERT_FILE"):
        _spec(server).resolve()

    assert not server.versions
