"""The output resource: credentials reach the store, and no view of Dagster's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster_gcp import GCSResource
from gcp_storage_emulator.server import create_server

from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.output import StorageOptions
from surge_dagster.resources import OutputStore
from surge_dagster.settings import StorageSettings, load_settings


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSResource]:
    """dagster-gcp's resource, and a server that it believes to be Google's."""
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


def test_a_gcs_resource_lends_its_credentials(emulator: GCSResource, monkeypatch: pytest.MonkeyPatch) -> None:
    assert emulator.get_client().bucket("vectors").exists(), "the resource talks to the emulator"
    credentials: Any = emulator.get_client()._credentials
    credentials.token = "token-of-the-resource"
    monkeypatch.setattr(GCSResource, "get_client", lambda self: type("Client", (), {"_credentials": credentials}))
    store = open_in_a_run(OutputStore(url="gs://vectors/out", include_text=True, gcs=emulator))
    headers = store._client._sign("GET", "https://h/", {}, b"")
    assert headers["Authorization"] == "Bearer token-of-the-resource"


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
