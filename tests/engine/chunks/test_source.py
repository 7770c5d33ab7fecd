"""Chunks as rows: their ids, columns and places, and that the rows of the source are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.chunks.source import COLUMNS, ChunkedSource, cut_selection
from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources.partition import Partition, RejectedRow, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.tables.opening import open_source
from tests.engine.chunks.documents import prose, splitter

# Cuts a document in a process of its own; gives its bytes, the tokens of its chunks and how much
# the resident memory has grown.
READER = """
import json, pathlib, re, sys
from surge_dagster.engine.chunks.source import in_chunks
from surge_dagster.engine.chunks.splitting import splitter_digest
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.encoder.worker.tokenization import load_tokenizer
from surge_dagster.engine.tables.opening import open_source

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

rule = ChunkRule(tokens=256, splitter=splitter_digest())
spec = EncodingSpec(sys.argv[2], chunks=rule)
tokenizer = load_tokenizer(spec.resolve())
source = open_source(sys.argv[1], max_text_bytes=2**24)
[partition] = in_chunks(source, spec)
before = peak()
size = tokens = 0
for batch in partition.read():
    size += len(batch.text_values)
    for start in range(0, len(batch), 100):
        tokens += int(tokenizer.encode(batch.texts[start:start + 100].to_pylist()).lengths.sum())
print(json.dumps([size, tokens, peak() - before]))
"""
LONG = prose(Random(1), 60)
SHORT = "A hat."


def write(folder: Path, **columns: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder


def partition_in(folder: Path, demo_folder: Path, **selection: Any) -> Partition:
    """The one partition of a folder in chunks of at most 64 tokens."""
    column = selection.pop("column", None)
    chosen = cut_selection(Selection(**selection), column)
    documents = open_source(folder, selection=chosen)
    own = splitter(demo_folder, tokens=64, column=column)
    [partition] = ChunkedSource(documents, lambda: own)
    return partition


def rows_of(partition: Partition) -> list[dict[str, Any]]:
    """The rows of a partition with their columns."""
    rows: list[dict[str, Any]] = []
    for batch in partition.read():
        assert batch.carried is not None
        columns = [batch.ids.to_pylist(), batch.texts.to_pylist(), batch.carried.to_pylist()]
        rows += [
            {"id": id_, "text": text, **more} for id_, text, more in zip(*columns, strict=True)
        ]
    return rows


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (pa.array(["x", "y#1"]), ["x#0", "y#1#0"]),
        (pa.array([7, 8]), ["7#0", "8#0"]),
        (pa.array([b"\xff", b"y"]), [b"\xff#0", b"y#0"]),
    ],
)
def test_chunk_is_named_by_its_document_and_number(
    tmp_path: Path, demo_folder: Path, ids: pa.Array, names: list[Any]
) -> None:
    folder = write(tmp_path, id=ids, text=[SHORT, "A bottle."])

    rows = rows_of(partition_in(folder, demo_folder))

    assert [row["id"] for row in rows] == names
    assert [row["document_id"] for row in rows] == ids.to_pylist()


def test_rows_of_a_long_document_follow_each_other(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x", "y"], text=[LONG, SHORT], price=[5, 6])

    *rows, last = rows_of(partition_in(folder, demo_folder, carried=("price",)))

    assert [row["chunk"] for row in rows] == list(range(len(rows)))
    assert [LONG[row["start"] : row["end"]] for row in rows] == [row["text"] for row in rows]
    assert "".join(row["text"] for row in rows) == LONG
    assert {row["price"] for row in rows} == {5}
    assert (last["id"], last["chunk"], last["price"]) == ("y#0", 0, 6)


def test_places_in_a_column_are_those_of_the_column(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x"], title=["Größe"], body=[LONG])

    rows = rows_of(
        partition_in(folder, demo_folder, text="{title}: {body}!", column="body", carried=("body",))
    )

    assert len(rows) > 5
    assert all(row["text"] == f"Größe: {LONG[row['start'] : row['end']]}!" for row in rows)
    assert "".join(LONG[row["start"] : row["end"]] for row in rows) == LONG


def test_document_whose_cut_column_is_empty_is_one_chunk(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x", "y"], title=["Hat", "Bag"], body=pa.array([None, "Red."]))

    rows = rows_of(partition_in(folder, demo_folder, text="{title}: {body}", column="body"))

    assert [row["text"] for row in rows] == ["Hat: ", "Bag: Red."]
    assert [(row["start"], row["end"]) for row in rows] == [(0, 0), (0, 4)]


def test_documents_are_counted_apart_from_chunks(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x", "y", "z"], text=[LONG, "  ", SHORT])

    partition = partition_in(folder, demo_folder, missing_text="skip")
    batches = list(partition.read())

    assert (partition.rows, partition.source_rows) == (None, 3)
    assert sum(batch.source_rows for batch in batches) == 2
    assert sum(batch.skipped for batch in batches) == 1
    assert sum(map(len, batches)) > 5


def test_documents_that_are_set_aside_are_named_once(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x", "x", None, "y"], text=[LONG, LONG, LONG, LONG])

    batches = list(partition_in(folder, demo_folder, bad_rows="set_aside").read())

    assert [row.row for batch in batches for row in batch.rejected] == [1, 2]
    assert sum(batch.source_rows for batch in batches) == 2


def test_large_batches_name_rejected_documents_once(demo_folder: Path) -> None:
    texts = [prose(Random(seed), 4000) for seed in range(8)]
    rejected = (RejectedRow(8, "row 8", None, "the id is null"),)
    documents = RowBatch(pa.array(range(8)), pa.array(texts, pa.large_string()), rejected=rejected)  # pyright: ignore
    listed = Partition("k", "v1", lambda: iter([documents]), lambda: "v1", rows=9)
    own = splitter(demo_folder, tokens=256)

    [partition] = ChunkedSource(_Listed([listed]), lambda: own)

    assert sum((batch.rejected for batch in partition.read()), ()) == rejected


def test_partition_without_documents_has_the_columns_of_chunks(
    tmp_path: Path, demo_folder: Path
) -> None:
    folder = write(tmp_path, id=pa.array([], pa.int64()), text=pa.array([], pa.string()))

    [batch] = partition_in(folder, demo_folder).read()

    assert (len(batch), batch.source_rows, batch.ids.type) == (0, 0, pa.string())
    assert batch.carried is not None
    assert tuple(batch.carried.schema.names) == COLUMNS


def test_large_batches_of_documents_become_several_of_chunks(demo_folder: Path) -> None:
    texts = [prose(Random(seed), 4000) for seed in range(8)]
    documents = RowBatch(pa.array(range(8)), pa.array(texts, pa.large_string()))  # pyright: ignore

    def read() -> Iterator[RowBatch]:
        yield documents

    listed = Partition("k", "v1", read, lambda: "v1", rows=8)
    own = splitter(demo_folder, tokens=256)
    [partition] = ChunkedSource(_Listed([listed]), lambda: own)
    batches = list(partition.read())

    assert len(batches) > 1
    assert sum(batch.source_rows for batch in batches) == 8
    assert max(batch.value_bytes for batch in batches) < 3 * 2**20


class _Listed(list[Partition]):
    url = "memory"


def test_place_of_a_chunk_is_that_of_its_document(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x", "y"], text=[LONG, SHORT])

    [batch] = partition_in(folder, demo_folder).read()

    assert batch.place is not None
    assert batch.place(len(batch) - 2) == "row 0"
    assert batch.place(len(batch) - 1) == "row 1"


def test_document_that_leaves_no_room_refuses_its_partition(
    tmp_path: Path, demo_folder: Path
) -> None:
    folder = write(tmp_path, id=["x", "y"], title=["Hat", "steel " * 70], body=[LONG, SHORT])
    partition = partition_in(folder, demo_folder, text="{title}: {body}", column="body")

    with pytest.raises(DataError, match=r"row 1: .* 73 tokens, .* 64 no room"):
        list(partition.read())


def test_rows_of_a_partition_cannot_be_divided(tmp_path: Path, demo_folder: Path) -> None:
    folder = write(tmp_path, id=["x"], text=[LONG])

    assert partition_in(folder, demo_folder).read_range is None


@pytest.mark.parametrize("text", ["{title}: {text}", "{body} {body}", "title"])
def test_column_that_the_text_does_not_have_once_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'body' cannot be cut into chunks"):
        cut_selection(Selection(text=text), "body")


@pytest.mark.parametrize("name", COLUMNS)
def test_carried_column_with_a_name_of_chunks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot be carried: chunks have"):
        cut_selection(Selection(carried=(name,)), None)


@pytest.mark.processes
def test_document_of_a_million_tokens_takes_little_memory(
    tmp_path: Path, demo_folder: Path
) -> None:
    folder = write(tmp_path, id=["x"], text=[prose(Random(5), 90_000)])

    ran = subprocess.run(
        [sys.executable, "-c", READER, str(folder), str(demo_folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    size, tokens, grown = json.loads(ran.stdout)
    print(f"{size / 1e6:.1f} MB of text, {tokens:,} tokens, {grown / 1e6:.0f} MB of memory")

    assert tokens > 10**6
    assert grown < 40 * size
