"""The output resource: credentials reach the store and are not shown by Dagster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from dagster._core.remote_representation.external_data import RepositorySnap

from surge_dagster.config.settings import StorageSettings, load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.store import StorageOptions
from surge_dagster.resources import OutputStore


def open_in_a_run(output: OutputStore) -> Any:
    """The store as an op gets it: Dagster makes new resources for each run."""
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
    """Exchanges a service account's key for a token, and is a bucket that records which token a request carries."""

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
        self.send_header("ETag", '"1"')
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(content.encode())


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The server's URL; the environment names the key of one of its service accounts."""
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


def test_store_uses_the_credentials_of_a_gcs_resource(google: str) -> None:
    """The real `GCSResource` gets a token with google-auth and a service account's key; obstore sends it with requests.

    Only Google's servers are replaced, by a fake for the token and the bucket. google-cloud-storage's client has no
    public attribute for its credentials, so the store takes the client's `_credentials`; this test fails if a release
    removes them.
    """
    package = pytest.importorskip("dagster_gcp", reason="not installed: the extra 'integrations'")

    storage = StorageOptions(endpoint=google)
    store = open_in_a_run(
        OutputStore(url="gs://vectors/out", include_text=True, storage=storage, gcs=package.GCSResource(project="test"))
    )
    with store.create("space/a.parquet") as upload:
        upload.sink.write(b"content")
        upload.publish(lambda: None)
    with pytest.raises(FileNotFoundError):
        store.open("space/b.parquet")
    assert Google.shown == [(method, "Bearer token-of-the-resource") for method in ("PUT", "GET")]


def test_storage_options_reach_the_store_and_are_not_shown_by_dagster() -> None:
    given = {"access_key_id": "hunter1", "secret_access_key": "hunter2", "endpoint": "http://127.0.0.1:9"}
    options = StorageSettings.model_validate(given)
    webhook = "https://127.0.0.1:9/hunter3"
    settings = load_settings(output="s3://vectors/out", storage_options=options, alert_webhook=webhook)
    definitions = embedding_catalog(settings)
    output = definitions.resources["output"] if definitions.resources else None
    assert isinstance(output, OutputStore)
    store = open_in_a_run(output)
    assert store._store.credential_provider()["secret_access_key"] == "hunter2"
    everything_the_ui_gets = dg.serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    assert "s3://vectors/out" in everything_the_ui_gets
    assert "hunter" not in everything_the_ui_gets + repr(output)
    shown = repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert "hunter2" not in shown + repr(StorageOptions(secret_access_key="hunter2")) and "hunter3" not in shown
