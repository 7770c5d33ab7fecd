"""The command line and a Dagster job on catalogs in a bucket and of other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surge_dagster.commands.cli import app
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import numbered_rows, write_rows

MODEL = ("--model", "hash://16")


@pytest.fixture
def in_bucket(object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three partitions in a bucket that the settings of the environment reach."""
    for number, key in enumerate(
        ("lang=de/category=a", "lang=de/category=b", "lang=en/category=a"), 4
    ):
        content = write_rows(tmp_path / "x.parquet", numbered_rows(key, number)).read_bytes()
        object_server.put(f"cat/{key}/0.parquet", content)
    options = {"endpoint": object_server.url, "access_key_id": "a", "secret_access_key": "b"}
    monkeypatch.setenv("SURGE_STORAGE_OPTIONS", json.dumps(options))
    monkeypatch.chdir(tmp_path)
    return f"s3://{BUCKET}/cat"


@pytest.mark.parametrize("output", ["out", f"s3://{BUCKET}/out"])
def test_catalog_in_a_bucket_is_embedded_planned_and_verified(in_bucket: str, output: str) -> None:
    embedded = CliRunner().invoke(app, ["embed", in_bucket, output, *MODEL])
    assert embedded.exit_code == 0, embedded.output
    assert "3 partitions" in embedded.output and "15 texts" in embedded.output
    planned = CliRunner().invoke(app, ["plan", in_bucket, "--texts-per-second", "100", "--explain"])
    assert planned.exit_code == 0 and "3 partitions, 15 texts, the largest has 6" in planned.output
    verified = CliRunner().invoke(app, ["verify", in_bucket, output, *MODEL, "--reencode", "all"])
    assert verified.exit_code == 0 and "15 texts read" in verified.output, verified.output


def test_pattern_is_embedded_and_the_refusal_of_one_table_names_the_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shoes", "hats"):
        write_rows(tmp_path / "products" / f"{name}.parquet", numbered_rows(name, 4))
    embedded = CliRunner().invoke(app, ["embed", "products/{category}.parquet", "out", *MODEL])
    assert embedded.exit_code == 0 and "2 partitions" in embedded.output, embedded.output
    assert {path.name for path in Path("out").glob("*/*.parquet")} == {
        "shoes.parquet",
        "hats.parquet",
    }
    refused = CliRunner().invoke(app, ["embed", "products/hats.parquet", "out", *MODEL])
    assert "`surge-dagster embed products/hats.parquet OUTPUT --partition-by COLUMN`" in str(
        refused.exception
    )


def test_dagster_reads_a_catalog_in_a_bucket(in_bucket: str, tmp_path: Path) -> None:
    import dagster as dg

    from surge_dagster.config.settings import load_settings
    from surge_dagster.definitions import embedding_catalog

    definitions = embedding_catalog(
        load_settings(source=in_bucket, output=str(tmp_path / "out"), model="hash://16")
    )
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("catalog_refresh").execute_in_process(
            instance=instance
        )
        assert result.success
    assert len(list((tmp_path / "out").glob("*/lang*.parquet"))) == 3
