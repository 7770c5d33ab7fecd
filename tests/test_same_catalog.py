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
from tests.small_catalogs import DIMENSION, Rows, keys_of, read_embedded, write_catalog

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


def in_parquet(rows_of: Catalog, folder: Path) -> Source:
    return open_source(
        write_parquet(folder / "t.parquet", shuffled(rows_of)), partition_by=["category"]
    )


def in_csv(rows_of: Catalog, folder: Path) -> Source:
    return open_source(write_csv(folder / "t.csv", shuffled(rows_of)), partition_by=["category"])


def in_json_lines(rows_of: Catalog, folder: Path) -> Source:
    path = folder / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for row in shuffled(rows_of):
            document = dict(zip(NAMES, row, strict=True))
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return open_source(path, partition_by=["category"])


KINDS: dict[str, Callable[[Catalog, Path], Source]] = {
    "Parquet table": in_parquet,
    "CSV": in_csv,
    "JSON lines": in_json_lines,
}


def files(output: Path, keys: Collection[str]) -> Found:
    """Return ids, texts, content digest and vectors of each partition, the only files."""
    [described] = output.glob("*/space.json")
    space = described.parent.name
    assert len(list(described.parent.glob("*.parquet"))) == len(keys)
    found: Found = {}
    for key in keys:
        read = read_embedded(output, space, key)
        assert read.matrix.shape == (len(read.ids), DIMENSION)
        found[key] = (read.ids, read.texts, read.facts.content_digest, read.matrix.tobytes())
    return found


def embedded(source: Source, pool: EncoderPool, output: Path) -> Found:
    return files(output, keys_of(finish_receipts(make_run(pool, source, output), "encoded")))


@pytest.fixture(scope="module")
def rows_of() -> Catalog:
    return catalog()


@pytest.fixture(scope="module")
def of_folders(
    rows_of: Catalog, hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory
) -> Found:
    """What the catalog in hive folders on the disk gives."""
    root = tmp_path_factory.mktemp("folders")
    source = open_source(write_catalog(root / "catalog", rows_of, version=None))
    found = embedded(source, hash_pool, root / "out")
    for key, rows in rows_of.items():
        ids, texts, *_ = found[key]
        assert list(zip(ids, texts or (), strict=True)) == rows
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_table_gives_what_folders_give(
    kind: str, rows_of: Catalog, of_folders: Found, hash_pool: EncoderPool, tmp_path: Path
) -> None:
    source = KINDS[kind](rows_of, tmp_path)

    assert embedded(source, hash_pool, tmp_path / "out") == of_folders


def test_bucket_gives_what_folders_give(
    rows_of: Catalog,
    of_folders: Found,
    hash_pool: EncoderPool,
    object_server: ObjectServer,
    tmp_path: Path,
) -> None:
    local = write_catalog(tmp_path / "catalog", rows_of, version=None)
    for path in local.rglob("*.parquet"):
        name = path.relative_to(local)
        object_server.put(f"cat/{name}", path.read_bytes())

    source = open_source(f"s3://{BUCKET}/cat", storage_options=object_server.options)

    assert embedded(source, hash_pool, tmp_path / "out") == of_folders
