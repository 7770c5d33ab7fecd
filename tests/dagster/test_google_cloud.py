"""The setting `gcp` and the resources of dagster-gcp, with a real google-auth and fakes of Google's
services."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from surge_dagster import embedding_catalog
from surge_dagster.config.settings import load_settings
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store import StorageOptions
from surge_dagster.engine.store.object_client import GcpOptions
from surge_dagster.orchestration.names import CatalogResources
from surge_dagster.resources import CatalogSource, OutputStore
from tests.dagster.conftest import Ran, Workbench, execute
from tests.dagster.private_dagster import shown_by_the_ui
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.engine.tables.bigquery_fake import CATALOG, SOURCE, FakeBigQuery, table_of
from tests.google_account import TOKEN, GoogleAccount
from tests.pages import code_blocks
from tests.small_catalogs import Rows, write_rows

PAGE = (Path(__file__).parent.parent.parent / "docs" / "storage.md").read_text()
ROWS: dict[str, Rows] = {"category=a": [("1", "boots")], "category=b": [("2", "sandals")]}


@pytest.fixture
def bucket(
    object_server: ObjectServer, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> ObjectServer:
    """A bucket with a catalog, at the endpoint that the environment names."""
    monkeypatch.setenv("SURGE_STORAGE_OPTIONS", json.dumps({"endpoint": object_server.url}))
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    for key, rows in ROWS.items():
        object_server.put(
            f"catalog/{key}/0.parquet", write_rows(bench.root / "x.parquet", rows).read_bytes()
        )
    return object_server


def refresh(bench: Workbench, definitions: dg.Definitions) -> Ran:
    job = definitions.resolve_job_def("catalog_refresh")
    return execute(bench.instance, job)


def catalog_in_the_bucket(**gcp: Any) -> dg.Definitions:
    return embedding_catalog(
        source=f"gs://{BUCKET}/catalog", output=f"gs://{BUCKET}/vectors", gcp=gcp
    )


def test_project_of_the_key_runs_queries_if_no_other_is_set(google_account: GoogleAccount) -> None:
    fake = FakeBigQuery(table_of(CATALOG))
    gcp: Any = {"gcp_credentials": google_account.gcp_credentials}
    with fake.serve_by_default():
        list(load_settings(source=SOURCE, partition_by="category", gcp=gcp).open_source())

    assert fake.projects == ["project-of-the-key"]


def test_fields_of_a_bigquery_resource_are_used(
    bench: Workbench, google_account: GoogleAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster_gcp import BigQueryResource

    monkeypatch.setenv("GCP_KEY", google_account.gcp_credentials)
    fake = FakeBigQuery(table_of(CATALOG))
    made = embedding_catalog(
        source=SOURCE, partition_by="category", output=str(bench.output), model="hash://16"
    )
    resource = BigQueryResource(project="p", location="EU", gcp_credentials=dg.EnvVar("GCP_KEY"))
    catalog = CatalogSource(url=SOURCE, partition_by=["category"], bigquery=resource)  # pyright: ignore[reportCallIssue]
    definitions = dg.Definitions(
        jobs=made.jobs, resources={**(made.resources or {}), "catalog": catalog}
    )
    with fake.serve_by_default():
        ran = refresh(bench, definitions)

    assert ran.success, ran.failure()
    assert set(fake.tokens) == {f"Bearer {TOKEN}"}
    assert set(fake.locations) == {"EU"}


def test_gcs_resource_without_the_setting_uses_the_environment(
    google_account: GoogleAccount, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dagster_gcp import GCSResource

    (tmp_path / "key.json").write_text(google_account.key)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    storage = StorageOptions(endpoint=google_account.url)
    store = OutputStore(
        url="gs://vectors/out", storage=storage, gcs=GCSResource(project="test")
    ).open()

    with pytest.raises(FileNotFoundError):
        store.open("space/b.parquet")

    assert google_account.requests == [("GET", f"Bearer {TOKEN}")]


def test_key_is_not_shown_by_dagster(
    bench: Workbench, bucket: ObjectServer, google_account: GoogleAccount
) -> None:
    definitions = catalog_in_the_bucket(
        project="my-project", gcp_credentials=google_account.gcp_credentials
    )
    ran = refresh(bench, definitions)

    snapshot = shown_by_the_ui(definitions)
    entries = "".join(map(dg.serialize_value, bench.instance.all_logs(ran.run_id)))

    config = dg.serialize_value(bench.instance.get_run_by_id(ran.run_id))  # pyright: ignore[reportArgumentType]

    assert ran.success
    assert "my-project" in snapshot
    assert not google_account.is_quoted(snapshot)
    assert not google_account.is_quoted(entries)
    assert not google_account.is_quoted(config)
    assert not google_account.is_quoted(repr(definitions.resources))


def test_key_is_not_shown_by_settings_and_options(google_account: GoogleAccount) -> None:
    gcp: Any = {"gcp_credentials": google_account.gcp_credentials}
    settings = load_settings(gcp=gcp)
    shown = (settings, settings.model_dump(), settings.model_dump_json(), settings.cloud_options())
    assert not google_account.is_quoted(" ".join(map(repr, shown)))


@pytest.mark.parametrize("source", [f"gs://{BUCKET}/catalog", SOURCE])
def test_error_of_a_revoked_key_does_not_quote_it(
    google_account: GoogleAccount, source: str
) -> None:
    google_account.is_revoked = True
    gcp: Any = {"project": "p", "gcp_credentials": google_account.gcp_credentials}
    storage: Any = {"endpoint": google_account.url}
    settings = load_settings(
        source=source, partition_by="category", gcp=gcp, storage_options=storage
    )

    with (
        FakeBigQuery(table_of(CATALOG)).serve_by_default(),
        pytest.raises((ConfigError, TransientError)) as refused,
    ):
        list(settings.open_source())

    assert not google_account.is_quoted(str(refused.getrepr(style="native")))


def test_machines_of_a_cluster_get_the_account(google_account: GoogleAccount) -> None:
    gcp = {"project": "p", "gcp_credentials": google_account.gcp_credentials}
    made = embedding_catalog(source=SOURCE, partition_by="category", output="gs://b/out", gcp=gcp)
    resources = CatalogResources(
        *((made.resources or {})[name] for name in ("catalog", "encoder", "output"))
    )
    travelled = pickle.loads(pickle.dumps(resources.run_setup()))

    fake = FakeBigQuery(table_of(CATALOG))
    with fake.serve_by_default():
        listed = [partition.key for partition in travelled.open_source()]

    assert len(listed) == len(CATALOG)
    assert set(fake.tokens) == {f"Bearer {TOKEN}"}
    assert travelled.output_options.gcp.gcp_credentials == google_account.gcp_credentials


def test_settings_of_the_page_about_storage_are_accepted() -> None:
    [text] = [block for block in code_blocks(PAGE, "yaml") if "gcp:" in block]
    assert load_settings(**yaml.safe_load(text)).cloud_options().gcp == GcpOptions(
        "my-project", "EU"
    )


def test_program_of_the_page_about_storage_runs(
    bench: Workbench,
    bucket: ObjectServer,
    google_account: GoogleAccount,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [program] = code_blocks(PAGE, "python")
    monkeypatch.setenv("GCP_KEY", google_account.gcp_credentials)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_account.url)
    google_account.blobs = [
        {"name": "vectors/a.parquet", "size": "7"},
        {"name": "vectors/b.parquet", "size": "8"},
    ]
    names: dict[str, Any] = {}

    exec(program.replace("my-bucket", BUCKET), names)
    ran = refresh(bench, names["defs"])
    job = names["defs"].resolve_implicit_global_asset_job_def()

    reported = job.execute_in_process(
        instance=bench.instance, asset_selection=[names["bytes_of_vectors"].key]
    )

    assert ran.success, ran.failure()
    assert len(ran.materialized()) == len(ROWS)
    assert reported.output_for_node("bytes_of_vectors") == 15
    assert set(google_account.requests) == {("GET", f"Bearer {TOKEN}")}
