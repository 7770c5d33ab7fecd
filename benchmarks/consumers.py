"""What tables that follow the vectors cost: a first load beside the client's own bulk speed, and rows sent for changes.

    python -m benchmarks.consumers --rows 200000

A first load reads the files with their checksums and writes every row. Beside it stands the same client with the same
rows in memory: `create_table` of LanceDB, and `COPY` of psycopg with pgvector's types. The index of the vectors is not
part of either; the primary key is part of the load. The sides take turns, the disk is flushed before each, and the
median of the pairs counts. Then one percent of the rows of each partition is edited, inserted and deleted, and handed
over. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import Document, Target, at_most, print_document, say, start_document
from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.target import Target as Table
from surge_dagster.engine.feed.change_files import ChangeFeed, changed_ids
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import file_name, new_writer
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.superbatch import ADDED, CHANGED, OpenPartition, RowChanges
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.text_hash import text_hashes

AIM_SHARE_OF_BULK = 0.7
AIM_SENT = 1.1  # rows for each changed row
_PARTITION_ROWS = 400
_CHANGED = 4  # of each partition: two edited, one inserted, one deleted


class Output:
    """An output of random vectors, with the change files that lead to its present state."""

    def __init__(self, root: Path, rows: int, dimension: int) -> None:
        self.store = LocalStore(root)
        self.space: Space = claim_space(self.store, EncodingSpec(f"hash://{dimension}").resolve())
        self._chance = np.random.default_rng(16)
        self.keys = [f"p{number}" for number in range(rows // _PARTITION_ROWS)]
        self._versions: dict[str, str] = {}
        self._vectors: dict[str, np.ndarray] = {}
        for key in self.keys:
            self._write(key, [f"{key}-{row}" for row in range(_PARTITION_ROWS)], self._random(_PARTITION_ROWS))

    def change(self) -> int:
        """Edit two rows of each partition, insert one and delete one; gives how many that are."""
        for key in self.keys:
            operations = np.zeros(_PARTITION_ROWS, np.int8)
            operations[[7, 90]], operations[-1] = CHANGED, ADDED
            ids = [f"{key}-{row}" for row in range(1, _PARTITION_ROWS)] + [f"{key}-new"]
            before, vectors = self._versions[key], np.roll(self._vectors[key], -1, axis=0)
            vectors[operations != 0] = self._random(_CHANGED - 1)
            self._write(key, ids, vectors)
            found = RowChanges(operations, pa.array([f"{key}-0"]), before)
            opened = OpenPartition(Partition(key, "", lambda: iter(()), lambda: ""), changes=found)
            feed, changed = ChangeFeed(self.store, self.space.name), changed_ids(operations, [pa.array(ids)])
            feed.write(opened, self._versions[key], changed)
        return _CHANGED * len(self.keys)

    def in_memory(self) -> list[pa.RecordBatch]:
        """The rows as a client would have them, without the operation."""
        feed = changes(self.store, since={})
        batches = (batch for partition in feed for batch in partition if batch.column("op")[0].as_py() == "add")
        return [batch.select(batch.schema.names[1:]) for batch in batches]

    def _random(self, rows: int) -> np.ndarray:
        vectors = self._chance.standard_normal((rows, self.space.dimension), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _write(self, key: str, ids: list[str], vectors: np.ndarray) -> None:
        self._vectors[key] = vectors
        version = self._versions[key] = secrets.token_hex(16)
        space, texts = self.space, pa.array([f"a short text, {row}" for row in ids], pa.large_string())
        named = ("hash", "fp32", version, version, version)
        facts = FileFacts(key, space.name, *named, len(ids), space.dimension, 0, rows_version=version)
        columns = schema(pa.string(), space.dimension, "float32", include_text=True)
        path = self.store.root / file_name(space.name, key)
        with pa.OSFile(str(path), "wb") as sink, new_writer("parquet", sink, columns, facts) as writer:
            writer.append(pa.array(ids), texts, text_hashes(texts), vectors)
            writer.close()


def measure(
    name: str,
    output: Output,
    table_of: Callable[[int], Table],
    bulk: Callable[[int, list[pa.RecordBatch]], None],
    pairs: int,
) -> Document:
    """Load tables, beside the client alone; then change the output and hand over.

    Args:
        table_of: a new table, by number.
        bulk: writes rows into a new table, by number.
    """
    batches = output.in_memory()
    rows = sum(map(len, batches))
    tables = [table_of(number) for number in range(pairs)]
    feeds = [partial(changes, output.store, f"{name}-{number}") for number in range(pairs)]
    bulk(pairs, batches[:1])  # imports the client
    seconds: list[dict[str, float]] = []
    for number in range(pairs):
        sides = {"bulk": partial(bulk, number, batches), "load": partial(tables[number].apply, feeds[number])}
        order = reversed(sides) if number % 2 else sides
        seconds.append({side: _seconds(sides[side]) for side in order})
        say(f"{name}: {seconds[-1]}")
    batches.clear()
    changed = output.change()
    begun = time.perf_counter()
    done = tables[0].apply(feeds[0])
    changes_seconds = time.perf_counter() - begun
    found = compare(done.feed, tables[0])
    document = {
        "rows": rows,
        "bulk_rows_per_second": round(rows / median(pair["bulk"] for pair in seconds)),
        "load_rows_per_second": round(rows / median(pair["load"] for pair in seconds)),
        "share_of_bulk": round(median(pair["bulk"] / pair["load"] for pair in seconds), 3),
        "pairs": seconds,
        "changed_rows": changed,
        "sent_per_changed_row": round((done.rows_sent + done.rows_deleted) / changed, 3),
        "changes_seconds": round(changes_seconds, 2),
        "commits": done.commits,
        "wrong": found.wrong,
    }
    say(f"{name}: {document}")
    return document


def add_to_lancedb(folder: Path, number: int, batches: list[pa.RecordBatch]) -> None:
    """What LanceDB takes for the rows itself."""
    import lancedb

    reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
    lancedb.connect(folder).create_table(f"bulk_{number}", data=reader)


def copy_to_postgres(dsn: str, number: int, batches: list[pa.RecordBatch]) -> None:
    """What COPY takes for the rows itself."""
    import psycopg
    from pgvector.psycopg import register_vector

    dimension = batches[0].schema.field("embedding").type.list_size
    columns = f"partition text, id text, text text, embedding vector({dimension})"
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(connection)
        connection.execute(f"CREATE TABLE bulk_{number} ({columns})".encode())
        with connection.cursor().copy(f"COPY bulk_{number} FROM STDIN WITH (FORMAT BINARY)".encode()) as copy:
            copy.set_types(["text", "text", "text", "vector"])
            for batch in batches:
                matrix = batch.column("embedding").flatten().to_numpy().reshape(len(batch), dimension)
                for row in zip(
                    *(batch.column(name).to_pylist() for name in batch.schema.names[:3]), matrix, strict=True
                ):
                    copy.write_row(row)


def _seconds(work: Callable[[], Any]) -> float:
    os.sync()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    document, targets = (
        start_document("consumers", given, ("lancedb", "pgvector", "psycopg", "pyarrow")),
        list[Target](),
    )
    with tempfile.TemporaryDirectory(prefix="surge-consumers-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user where this one is root
        lance = Output(folder / "for-lancedb", given.rows, given.dimension)
        found = {
            "lancedb": measure(
                "lancedb",
                lance,
                lambda number: LanceTable(str(folder / "lance"), f"table_{number}"),
                partial(add_to_lancedb, folder / "lance"),
                given.pairs,
            )
        }
        try:
            from pgserver.postgres_server import get_server
        except ImportError:
            say("pgvector: not measured, since pgserver is not installed")
        else:
            postgres = Output(folder / "for-pgvector", given.rows, given.dimension)
            with get_server(folder / "postgres", cleanup_mode="delete") as server:
                dsn = server.get_uri()
                found["pgvector"] = measure(
                    "pgvector",
                    postgres,
                    lambda number: PgVectorTable(dsn, f"table_{number}", index="none"),
                    partial(copy_to_postgres, dsn),
                    given.pairs,
                )
    for kind, figures in found.items():
        targets.append(Target(f"{kind}: first load, share of bulk speed", AIM_SHARE_OF_BULK, figures["share_of_bulk"]))
        targets.append(at_most(f"{kind}: rows sent per changed row", AIM_SENT, figures["sent_per_changed_row"]))
    print_document(document | {"consumers": found}, (), targets)


if __name__ == "__main__":
    main()
