"""Helpers of the catalog tests: distributions as an installer writes them, and the content of a
catalog folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from surge_dagster.engine.support.keys import encode_key


def functions(count: int, *, prefix: str = "task") -> str:
    """The source of a module with `count` documented functions."""
    return "\n".join(f'def {prefix}_{n}():\n    """{prefix} number {n}."""\n' for n in range(count))


def install(site: Path, name: str, files: Mapping[str, str | bytes], version: str = "1.0") -> None:
    """Install a distribution into `site`; another version of it is replaced."""
    uninstall(site, name)
    record: list[str] = []
    for path, content in files.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        target.write_bytes(data)
        record.append(f"{path},sha256=of-{version},{len(data)}")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")


def uninstall(site: Path, name: str) -> None:
    """Remove the metadata that `install` wrote; the sources stay."""
    for info in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(info)


def rows_of(catalog: Path, key: str) -> list[tuple[str, str]]:
    """The rows of a partition on disk."""
    table = pq.ParquetFile(catalog / f"partition={encode_key(key)}" / "part-0.parquet").read()
    return list(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


def sizes_of(catalog: Path) -> dict[str, int]:
    """Rows of each partition folder on disk, by the folder's encoded key."""
    return {
        path.parent.name.removeprefix("partition="): pq.read_metadata(path).num_rows
        for path in sorted(catalog.glob("partition=*/*.parquet"))
    }
