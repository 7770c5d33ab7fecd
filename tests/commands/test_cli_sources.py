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
