"""Runs that are launched as the UI launches them give the same files from a table, a bucket and an asset."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from tests.dagster.dev_server import dev_server
from tests.engine.sources.tables import write_csv
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import DIMENSION, write_catalog
from tests.test_same_catalog import Folders, catalog, files, frame, shuffled


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_launches_of_a_table_a_bucket_and_an_asset_give_what_folders_give(
    hash_pool: EncoderPool, object_server: ObjectServer, tmp_path: Path
) -> None:
    """A minute: `dagster dev` starts, and five runs, each a process."""
    folders = Folders(catalog(), hash_pool, tmp_path / "folders")
    for path in write_catalog(tmp_path / "hive", folders.rows_of, version=None).rglob("*.parquet"):
        object_server.put(f"cat/{path.relative_to(tmp_path / 'hive')}", path.read_bytes())
    pq.write_table(frame(folders.rows_of), tmp_path / "products.parquet")
    variables = {
        "SOURCES_TABLE": str(write_csv(tmp_path / "products.csv", shuffled(folders.rows_of))),
        "SOURCES_BUCKET": f"s3://{BUCKET}/cat",
        "SOURCES_FRAME": str(tmp_path / "products.parquet"),
        "SOURCES_OUTPUT": str(tmp_path / "out"),
    }
    options = {"endpoint": object_server.url, "access_key_id": "a", "secret_access_key": "b"}
    settings = {"model": f"hash://{DIMENSION}", "storage_options": json.dumps(options)}
    (tmp_path / "server").mkdir()
    code = Path(__file__).with_name("sources_location.py")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with dev_server(tmp_path / "server", 1, False, code, **settings) as server:
            assert server.finished(server.materialize("products")) == "SUCCESS"
            for name in ("table", "bucket", "asset"):
                assert server.finished(server.launch(f"{name}_catalog_refresh")) == "SUCCESS", name
                assert files(tmp_path / "out" / name, list(folders.rows_of)) == folders.found, name
