"""The output resource: credentials reach the store and are not shown by Dagster."""

from __future__ import annotations

from typing import Any

import dagster as dg

from surge_dagster.config.settings import StorageSettings, load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.store import StorageOptions
from surge_dagster.resources import OutputStore
from tests.dagster.private_dagster import shown_by_the_ui


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


def test_storage_options_reach_the_store_and_are_not_shown_by_dagster() -> None:
    given = {
        "access_key_id": "hunter1",
        "secret_access_key": "hunter2",
        "endpoint": "http://127.0.0.1:9",
    }
    options = StorageSettings.model_validate(given)
    webhook = "https://127.0.0.1:9/hunter3"
    settings = load_settings(
        output="s3://vectors/out", storage_options=options, alert_webhook=webhook
    )
    definitions = embedding_catalog(settings)
    output = definitions.resources["output"] if definitions.resources else None

    assert isinstance(output, OutputStore)

    store = open_in_a_run(output)
    assert store._store.credential_provider()["secret_access_key"] == "hunter2"

    everything_the_ui_gets = shown_by_the_ui(definitions)
    assert "s3://vectors/out" in everything_the_ui_gets
    assert "hunter" not in everything_the_ui_gets + repr(output)

    shown = repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert "hunter2" not in shown + repr(StorageOptions(secret_access_key="hunter2"))
    assert "hunter3" not in shown
