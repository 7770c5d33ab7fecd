"""Runs that are launched as the UI launches them give the same files from every kind of source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from tests.dagster.dev_server import dev_server
from tests.engine.sources.tables import write_csv, write_parquet
from tests.engine.store.object_server import ObjectServer
from tests.small_catalogs import DIMENSION
from tests.test_same_catalog import Folders, catalog, files, in_bucket, in_json_lines, shuffled, storage


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_launches_of_every_kind_of_source_give_what_folders_give(
    hash_pool: EncoderPool, object_server: ObjectServer, tmp_path: Path
) -> None:
    """A minute or two: `dagster dev` starts, and seven runs, each a process."""
    folders = Folders(catalog(), hash_pool, tmp_path / "folders")
    bucket = in_bucket(folders.rows_of, object_server, tmp_path / "hive")
    in_json_lines(folders.rows_of, tmp_path)
    tables = {
        "csv": write_csv(tmp_path / "t.csv", shuffled(folders.rows_of)),
        "parquet": write_parquet(tmp_path / "t.parquet", shuffled(folders.rows_of)),
        "lines": tmp_path / "t.jsonl.gz",
    }
    variables = {
        "SOURCES_TABLES": json.dumps({name: str(path) for name, path in tables.items()}),
        "SOURCES_FOLDERS": str(tmp_path / "hive"),
        "SOURCES_BUCKET": bucket,
        "SOURCES_FRAME": str(tables["parquet"]),
        "SOURCES_OUTPUT": str(tmp_path / "out"),
    }
    settings = {"model": f"hash://{DIMENSION}", "storage_options": json.dumps(storage(object_server))}
    (tmp_path / "server").mkdir()
    code = Path(__file__).with_name("sources_location.py")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with dev_server(tmp_path / "server", 1, False, code, **settings) as server:
            assert server.finished(server.materialize("products")) == "SUCCESS"
            for name in (*tables, "folders", "bucket", "asset"):
                assert server.finished(server.launch(f"{name}_catalog_refresh")) == "SUCCESS", name
                assert files(tmp_path / "out" / name, list(folders.rows_of)) == folders.found, name
