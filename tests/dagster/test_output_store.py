"""The output resource: credentials reach the store, and no view of Dagster's."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import dagster as dg
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from dagster._core.remote_representation.external_data import RepositorySnap

from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.store import StorageOptions
from surge_dagster.resources import OutputStore
from surge_dagster.settings import StorageSettings, load_settings

if TYPE_CHECKING:
    from dagster_gcp import GCSResource


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSResource]:
    """dagster-gcp's resource, and a server that it believes to be Google's."""
    from dagster_gcp import GCSResource  # takes seconds of every process that collects tests
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="vectors")
    server.start()
    listening: Any = server._api._httpd
    host, port = listening.socket.getsockname()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    try:
        yield GCSResource(project="test")
    finally:
        server.stop()


def open_in_a_run(output: OutputStore) -> Any:
    """The store as an op gets it: resources are made anew for each run."""
    opened: list[Any] = []

    @dg.op
    def look(output: OutputStore) -> None:
        opened.append(output.open())

    @dg.job(resource_defs={"output": output})
    def looking() -> None:
        look()

    assert looking.execute_in_process().success
    return opened[0]


class Google(BaseHTTPRequestHandler):
    """Where a service account's key is changed for a token, and a bucket that tells what token it was shown."""

    shown: ClassVar[list[tuple[str, str | None]]] = []

    def do_POST(self) -> None:
        self._answer(json.dumps({"access_token": "token-of-the-resource", "expires_in": 3600, "token_type": "Bearer"}))

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._remember()
        self._answer("")

    def do_GET(self) -> None:
        self._remember()
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _remember(self) -> None:
        self.shown.append((self.command, self.headers["Authorization"]))

    def _answer(self, content: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The server's URL; the environment names the key of a service account that belongs to it."""
    Google.shown.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Google) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        key = {"type": "service_account", "client_email": "a@b", "private_key": private.decode(), "token_uri": url}
        (tmp_path / "key.json").write_text(json.dumps(key))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield url
        finally:
            server.shutdown()
            serving.join()


def test_a_gcs_resource_lends_its_credentials(google: str) -> None:
    """The resource, google-auth, the key and the token's request are real, and so are the store's; Google is not.

    google-cloud-storage's client says in no public way what credentials it has, so the resource is asked for its
    client's `_credentials`: this test is what notices when they are no longer there.
    """
    from dagster_gcp import GCSResource

    storage = StorageOptions(endpoint=google)
    store = open_in_a_run(
        OutputStore(url="gs://vectors/out", include_text=True, storage=storage, gcs=GCSResource(project="test"))
    )
    with store.create("space/a.parquet") as upload:
        upload.write(b"content")
        upload.publish(lambda: None)
    with pytest.raises(FileNotFoundError):
        store.open("space/b.parquet")
    assert Google.shown == [(method, "Bearer token-of-the-resource") for method in ("PUT", "GET")]


def test_what_the_store_writes_the_resource_finds_in_the_same_bucket(emulator: GCSResource) -> None:
    """The resource, its client and the store are real, and talk to one server, gcp-storage-emulator.

    Of GCS's XML API, which the store speaks, the emulator takes a PUT of a whole object and no more: no listing, no
    HEAD, no condition, no upload in parts, and what it answers to a GET is not what obstore reads. So a run cannot use
    it; runs, with conditions and all, are tested against moto's server in tests/engine/test_run_object_store.py.
    """
    storage = StorageOptions(endpoint=os.environ["STORAGE_EMULATOR_HOST"])
    store = open_in_a_run(OutputStore(url="gs://vectors/out", include_text=True, storage=storage, gcs=emulator))
    with store.create("space/a.parquet") as upload:
        upload.sink.write(b"content")
        upload.publish(lambda: None)
    bucket = emulator.get_client().bucket("vectors")
    assert [blob.name for blob in bucket.list_blobs()] == ["out/space/a.parquet"]
    assert bucket.blob("out/space/a.parquet").download_as_bytes() == b"content"


def test_options_reach_the_store_and_no_view_of_dagsters() -> None:
    given = {"access_key_id": "hunter1", "secret_access_key": "hunter2", "endpoint": "http://127.0.0.1:9"}
    options = StorageSettings.model_validate(given)
    webhook = "https://127.0.0.1:9/hunter3"
    settings = load_settings(output="s3://vectors/out", storage_options=options, alert_webhook=webhook)
    definitions = embedding_catalog(settings)
    output = definitions.resources["output"] if definitions.resources else None
    assert isinstance(output, OutputStore)
    store = open_in_a_run(output)
    assert store._client._sign("GET", "http://127.0.0.1:9/", {}, b"")["Authorization"].count("hunter1") == 1
    everything_the_ui_gets = dg.serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    assert "s3://vectors/out" in everything_the_ui_gets
    assert "hunter" not in everything_the_ui_gets + repr(output)
    shown = repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert "hunter2" not in shown + repr(StorageOptions(secret_access_key="hunter2")) and "hunter3" not in shown
