"""The same catalog in folders, tables and a bucket gives the same rows, digests and vectors."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.sources import Source
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import finish_receipts, make_run
from tests.engine.sources.tables import NAMES, Row, write_csv, write_parquet
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import DIMENSION, Rows, read_embedded, write_catalog

KEYS = ("shoes", "0042", "garden tools/größe 50%", "مرحبا", '中文, "quoted"')
WORDS = (
    "zwei ß",
    "中文 🙂",
    "été",
    "مرحبا",
    "a, b; c",
    '"quoted"',
    "it's",
    "two\nlines",
    "three\r\n\r\nlines",
    "\t",
    "\\n",
)
# What a reader of CSV or JSON may take for a null, a number, a date or a logical value.
PLAIN = (
    "",
    " ",
    "null",
    "NULL",
    "NA",
    "nan",
    "true",
    "007",
    "1e5",
    "-0",
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "[]",
)
Catalog = Mapping[str, Rows]
Found = dict[str, tuple[list[Any], list[str] | None, str, bytes]]


def catalog() -> Catalog:
    """Rows whose ids look like numbers and stand in no order; some texts repeat."""
    chosen = random.Random(5)
    made: Catalog = {}
    for key, count in zip(KEYS, (90, 1, 40, 62, 17), strict=True):
        ids = [f"{number:03}" for number in chosen.sample(range(1000), count)]
        texts = [*PLAIN, *(" ".join(chosen.choices(WORDS, k=4)) for _ in range(count))]
        made[key] = list(zip(ids, chosen.sample(texts[:count], count), strict=True))
    return made


def shuffled(rows_of: Mapping[str, Rows]) -> list[Row]:
    """One table; rows of different keys stand between each other, those of a key in their order."""
    coming = {key: iter(rows) for key, rows in rows_of.items()}
    turns = [key for key, rows in rows_of.items() for _ in rows]
    random.Random(6).shuffle(turns)
    return [(*next(coming[key]), key) for key in turns]


def in_folders(rows_of: Catalog, folder: Path) -> Source:
    return open_source(write_catalog(folder, rows_of, version=None))


def in_parquet(rows_of: Catalog, folder: Path) -> Source:
    return open_source(
        write_parquet(folder / "t.parquet", shuffled(rows_of)), partition_by=["category"]
    )


def in_csv(rows_of: Catalog, folder: Path) -> Source:
    return open_source(write_csv(folder / "t.csv", shuffled(rows_of)), partition_by=["category"])


def in_json_lines(rows_of: Catalog, folder: Path) -> Source:
    lines = [
        json.dumps(dict(zip(NAMES, row, strict=True)), ensure_ascii=False) + "\n"
        for row in shuffled(rows_of)
    ]
    path = folder / "t.jsonl.gz"
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return open_source(path, partition_by=["category"])


KINDS: dict[str, Callable[[Catalog, Path], Source]] = {
    "Parquet table": in_parquet,
    "CSV": in_csv,
    "JSON lines": in_json_lines,
}


def files(output: Path, keys: Collection[str]) -> Found:
    """Return ids, texts, content digest and vectors of each partition, the only files."""
    [space] = [path.parent.name for path in output.glob("*/space.json")]
    assert len(list((output / space).glob("*.parquet"))) == len(keys)
    found: Found = {}
    for key in keys:
        read = read_embedded(output, space, key)
        assert read.matrix.shape == (len(read.ids), DIMENSION)
        found[key] = (read.ids, read.texts, read.facts.content_digest, read.matrix.tobytes())
    return found


def embedded(source: Source, pool: EncoderPool, output: Path) -> Found:
    return files(
        output,
        [receipt.key for receipt in finish_receipts(make_run(pool, source, output), "encoded")],
    )


class Folders:
    """What the catalog in hive folders on the disk gives."""

    def __init__(self, rows_of: Catalog, pool: EncoderPool, folder: Path) -> None:
        self.rows_of = rows_of
        self.found = embedded(in_folders(rows_of, folder / "catalog"), pool, folder / "out")
        for key, rows in rows_of.items():
            assert list(zip(self.found[key][0], self.found[key][1] or (), strict=True)) == rows


@pytest.fixture(scope="module")
def folders(hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(catalog(), hash_pool, tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("kind", KINDS)
def test_table_gives_what_folders_give(
    kind: str, folders: Folders, hash_pool: EncoderPool, tmp_path: Path
) -> None:
    assert (
        embedded(KINDS[kind](folders.rows_of, tmp_path), hash_pool, tmp_path / "out")
        == folders.found
    )


def test_bucket_gives_what_folders_give(
    folders: Folders, hash_pool: EncoderPool, object_server: ObjectServer, tmp_path: Path
) -> None:
    for path in write_catalog(tmp_path / "catalog", folders.rows_of, version=None).rglob(
        "*.parquet"
    ):
        name = path.relative_to(tmp_path / "catalog")
        object_server.put(f"cat/{name}", path.read_bytes())

    source = open_source(f"s3://{BUCKET}/cat", storage_options=object_server.options)

    assert embedded(source, hash_pool, tmp_path / "out") == folders.found
