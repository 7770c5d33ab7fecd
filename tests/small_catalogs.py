"""Small catalogs on disk or in memory, and the outputs expected of them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import OutputFile, read_facts, write_file
from surge_dagster.engine.files.rows import carried_columns, matrix_of, schema
from surge_dagster.engine.sources.partition import (
    KEY_METADATA,
    SOURCE_VERSION_METADATA,
    Partition,
    RowBatch,
)
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.keys import encode_key

DIMENSION = 16

Rows = Sequence[tuple[Any, Any]]


def numbered_rows(key: str, count: int, *, words: int = 3, start: int = 0) -> list[tuple[str, str]]:
    """Rows whose texts differ from each other and from those of other keys."""
    return [
        (f"id-{row}", " ".join([f"{key}/{row}"] * words)) for row in range(start, start + count)
    ]


def ids_of(rows: Rows) -> list[Any]:
    return [row[0] for row in rows]


def texts_of(rows: Rows) -> list[Any]:
    return [row[1] for row in rows]


def columns_of(rows: Rows) -> tuple[list[Any], list[Any]]:
    """The ids and the texts of rows."""
    return ids_of(rows), texts_of(rows)


def numbered_catalog(sizes: Iterable[int], words: int = 3) -> dict[str, Rows]:
    """Partitions p0, p1, … of so many numbered rows."""
    catalog: dict[str, Rows] = {}
    for number, size in enumerate(sizes):
        catalog[f"p{number}"] = numbered_rows(f"p{number}", size, words=words)
    return catalog


def partition_folder(root: Path, key: str) -> Path:
    """Where a key's files lie in a catalog on disk."""
    return root / f"partition={encode_key(key)}"


def write_rows(
    path: Path,
    rows: Rows,
    *,
    key: str | None = None,
    version: str | None = None,
    id_type: pa.DataType | None = None,
    text_type: pa.DataType | None = None,
    columns: tuple[str, str] = ("id", "text"),
    **options: Any,
) -> Path:
    """Write one Parquet file; `options` go to pyarrow's writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids, texts = columns_of(rows)
    arrays = [pa.array(ids, id_type or pa.string()), pa.array(texts, text_type or pa.string())]
    table = pa.table(arrays, names=columns)
    declared = {KEY_METADATA: key, SOURCE_VERSION_METADATA: version}
    metadata = {name: value.encode() for name, value in declared.items() if value is not None}
    pq.write_table(table.replace_schema_metadata(metadata), path, **options)
    return path


def write_partition(
    root: Path, key: str, rows: Rows, *, version: str | None = "v1", **options: Any
) -> Path:
    """Write a partition of one file, which declares its key and version."""
    return write_rows(
        partition_folder(root, key) / "part-0.parquet", rows, key=key, version=version, **options
    )


def write_catalog(
    root: Path, partitions: Mapping[str, Rows], *, version: str | None = "v1"
) -> Path:
    """Write a catalog of one file per partition."""
    root.mkdir(parents=True, exist_ok=True)
    for key, rows in partitions.items():
        write_partition(root, key, rows, version=version)
    return root


def row_batch_of(rows: Rows, id_type: pa.DataType | None = None) -> RowBatch:
    """Rows as the engine passes them on."""
    ids, texts = columns_of(rows)
    return RowBatch(
        pa.array(ids, id_type or pa.string()),
        pa.array(texts, pa.large_string()),  # pyright: ignore[reportArgumentType]
    )


def partition_of(
    key: str, rows: Rows, *, version: str = "v1", batch_rows: int = 7, fails_at: int | None = None
) -> Partition:
    """A partition in memory; with `fails_at`, that row is refused."""

    def read() -> Iterator[RowBatch]:
        if not rows:
            yield row_batch_of(rows)
        for start in range(0, len(rows), batch_rows):
            if fails_at is not None and start <= fails_at < start + batch_rows:
                raise DataError(key, "this row is refused", "Fix it.", fails_at)
            yield row_batch_of(rows[start : start + batch_rows])

    return Partition(key, version, read, lambda: version)


@dataclass(frozen=True, slots=True)
class Embedded:
    """What a reader finds in one output file."""

    facts: FileFacts
    ids: list[Any]
    texts: list[str] | None
    text_hashes: list[bytes]
    matrix: np.ndarray


def read_embedded(output: Path, space: str, key: str) -> Embedded:
    """Read a partition's output file in full, comparing checksums."""
    name = file_name(space, key)
    with pa.OSFile(str(output / name)) as source:
        reader = OutputFile(source)
        facts = reader.facts
        table = pa.Table.from_batches(reader.read(), schema=reader.columns)
    whole = table.combine_chunks().to_batches() if table.num_rows else []
    matrix = matrix_of(whole[0]) if whole else np.empty((0, facts.dimension), np.float32)
    texts = table["text"].to_pylist() if "text" in table.column_names else None
    return Embedded(facts, table["id"].to_pylist(), texts, table["text_hash"].to_pylist(), matrix)


def assert_hash_vectors(matrix: np.ndarray, texts: list[str]) -> None:
    """Each text has the vector that `hash_pool` gives it."""
    np.testing.assert_array_equal(matrix, hash_vectors(texts, DIMENSION))


def assert_embedded(output: Path, space: str, key: str, rows: Rows) -> FileFacts:
    """Promise 1: row i of the output is row i of the source, with its own vector."""
    found = read_embedded(output, space, key)
    ids, texts = columns_of(rows)
    assert found.ids == ids
    assert found.texts == texts
    assert found.text_hashes == [sha256(text.encode()).digest()[:16] for text in texts]
    assert_hash_vectors(found.matrix, texts)
    assert found.facts.partition_key == key
    assert found.facts.rows == len(rows)
    assert found.facts.space == space
    return found.facts


def row_groups(footer: pq.FileMetaData) -> list[int]:
    """Rows of each row group."""
    return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **facts: object) -> None:
    """Write a file again as this project would, with other rows and matching facts: only the
    content is wrong."""
    table = pq.read_table(path)
    old = read_facts(pq.read_metadata(path))
    table = change(table)
    with pa.OSFile(str(path), "wb") as sink:
        carried = carried_columns(table.schema)
        kind = table.schema.field("id").type
        columns = schema(kind, DIMENSION, "float32", include_text=True, carried=carried)
        new = replace(old, rows=table.num_rows, **facts)  # pyright: ignore[reportArgumentType]
        write_file(sink, columns, new, [table.replace_schema_metadata(None).cast(columns)])


def tamper(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a file again as another program would: with other rows or columns, and the facts that
    it had."""
    entries = pq.read_metadata(path).metadata or {}
    facts = {name: value for name, value in entries.items() if name.startswith(b"surge.")}
    changed = change(pq.read_table(path)).replace_schema_metadata(facts)
    pq.write_table(changed, path)


def narrow(table: pa.Table, dimension: int = DIMENSION // 2) -> pa.Table:
    """A file's rows with vectors of fewer dimensions, or (-1) in a column without any."""
    vectors = [
        vector[:dimension] if dimension > 0 else vector
        for vector in table.column("embedding").to_pylist()
    ]
    place = table.schema.get_field_index("embedding")
    return table.set_column(
        place, "embedding", pa.array(vectors, pa.list_(pa.float32(), dimension))
    )


def with_vectors(table: pa.Table, change: Callable[[np.ndarray], np.ndarray]) -> pa.Table:
    """A file's rows with other vectors; `change` gets and gives a [rows, dimension] matrix."""
    column = table.schema.field("embedding")
    matrix = (
        table.column("embedding")
        .combine_chunks()
        .flatten()
        .to_numpy(zero_copy_only=False)
        .reshape(-1, DIMENSION)
    )
    values = pa.array(change(matrix.copy()).ravel(), pa.float32())
    changed = pa.FixedSizeListArray.from_arrays(values, DIMENSION).cast(column.type)
    return table.set_column(table.schema.get_field_index("embedding"), column, changed)


class FailingFile(io.FileIO):
    """A file that can be read only at its end, as on a disk with a bad sector."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() + (size or 0) < os.fstat(self.fileno()).st_size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


class FailingStore(LocalStore):
    """A local store that can read only the ends of some partitions' files."""

    def __init__(self, root: Path, *keys: str) -> None:
        super().__init__(root)
        self._endings = tuple(f"/{encode_key(key)}.parquet" for key in keys)

    def open(self, name: str, listed: StoredObject | None = None) -> pa.NativeFile:
        if name.endswith(self._endings):
            return pa.PythonFile(FailingFile(self.root / name), mode="r")
        return super().open(name, listed)


def published_files(output: Path, space: str) -> set[str]:
    """Every name in a space's folder, hidden ones included, but for what belongs to the folder
    itself."""
    return {path.name for path in (output / space).iterdir()} - {"space.json", ".lock"}


def keys_of(events: Iterable[Any]) -> list[str]:
    """Keys of receipts or failures, sorted."""
    return sorted(event.key for event in events)


def make_unreadable(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Have the system refuse to open what has `part` in its name in a local output; until
    `monkeypatch.undo()`."""
    open_file = LocalStore.open
    open_end = os.open

    def refuse(name: object) -> None:
        if part in str(name):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def open_listed(
        store: LocalStore, name: str, listed: StoredObject | None = None
    ) -> pa.NativeFile:
        refuse(name)
        return open_file(store, name, listed)

    def open_path(path: Any, *options: Any, **named: Any) -> Any:
        refuse(path)
        return open_end(path, *options, **named)

    monkeypatch.setattr(LocalStore, "open", open_listed)
    monkeypatch.setattr(os, "open", open_path)
