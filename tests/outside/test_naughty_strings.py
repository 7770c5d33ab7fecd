"""The Big List of Naughty Strings as texts, ids and partition keys, from every format to the
output."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.readers.loading import open_embeddings
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import finish_receipts, make_run

STRINGS: list[str] = [
    each
    for each in dict.fromkeys(
        json.loads((Path(__file__).parent / "data" / "naughty_strings.json").read_text())
    )
    if each
]
ROWS = [{"id": each, "text": each, "key": each} for each in STRINGS]


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_jsonl(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "key"])
        writer.writeheader()
        writer.writerows(ROWS)


@pytest.mark.parametrize("write", [write_parquet, write_jsonl, write_csv])
def test_naughty_ids_texts_and_keys_come_back_as_they_were(
    tmp_path: Path, hash_pool: EncoderPool, write: Callable[[Path], None]
) -> None:
    path = tmp_path / f"table.{write.__name__.removeprefix('write_')}"
    write(path)

    source = open_source(path, partition_by=["key"])
    receipts = finish_receipts(make_run(hash_pool, source, tmp_path / "out"))

    assert {receipt.key for receipt in receipts} == set(STRINGS)
    loaded = open_embeddings(open_store(tmp_path / "out")).lazy().collect()
    found = zip(loaded["partition"], loaded["id"], loaded["text"], strict=True)
    assert sorted(found) == sorted((each, each, each) for each in STRINGS)
