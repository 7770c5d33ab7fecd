"""Writes a catalog folder: one Parquet file per partition, and a file with the catalog's kind.

    <folder>/_catalog.json
    <folder>/partition=<encoded key>/part-0.parquet

A build replaces what an earlier build of the same kind wrote, and nothing else. Each file names its
source version, so that an output stays fresh after a build that wrote the same rows again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA
from surge_dagster.engine.support.keys import encode_key

_MANIFEST = "_catalog.json"
_COLUMNS = pa.schema(
    [pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)]
)


@dataclass(frozen=True, slots=True)
class CatalogSummary:
    partitions: int
    texts: int


def clear_catalog(root: Path, kind: str) -> None:
    """Create a folder for a build, or remove the partitions of an earlier build from it."""
    manifest = root / _MANIFEST
    content = json.dumps({"format": 1, "kind": kind})
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and _kind(manifest) != kind:
            raise ConfigError(
                f"{root} is not empty and was not built as a {kind} catalog, so nothing was "
                "changed in it. Choose another folder, or empty this one."
            )
        manifest.write_text(content)
        for partition in root.glob("partition=*"):
            shutil.rmtree(partition)
    except OSError as error:
        raise ConfigError(f"the catalog folder {root} can't be used: {error}") from error


def write_partition(
    root: Path, key: str, version: str, row_groups: Iterable[tuple[pa.Array, pa.Array]]
) -> None:
    """Write a partition's file; each pair of ids and texts becomes a row group."""
    path = root / f"partition={encode_key(key)}" / "part-0.parquet"
    schema = _COLUMNS.with_metadata(
        {KEY_METADATA: key.encode(), SOURCE_VERSION_METADATA: version.encode()}
    )
    try:
        path.parent.mkdir()
        # Ids and texts seldom repeat, so that dictionaries would only cost time.
        with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
            for ids, texts in row_groups:
                writer.write_batch(pa.record_batch([ids, texts], schema=schema))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}") from error


def _kind(manifest: Path) -> str | None:
    try:
        return json.loads(manifest.read_text())["kind"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
