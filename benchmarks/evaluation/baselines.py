"""The paper's baselines (SURGE, sections 2.2 and 5.3), with the product's files and any encoder of
texts.

- PBP, partition by partition: a call for each, then its file.
- FSB, fixed-size batches: calls of B texts whatever partitions they belong to, and all vectors in
  memory until the last one is there; then rows are regrouped by the labels of their partitions, and
  all files are written.
- PB-PBP-LB, sorted first-fit-decreasing packing: whole partitions are packed into bins of B texts
  by their sizes, which must be known before the first call; a call for each bin, then its files.

Each reads, checks the content of, and writes the same partitions as a run does. Where several files
are ready they are written by as many threads as a run has, but the next call waits for them: the
baselines overlap nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.encode.inputs import short_workload
from benchmarks.encode.peers import SentenceTransformersPool, Setting
from benchmarks.evaluation.metering import Meter, MeteredPool
from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import write_file
from surge_dagster.engine.files.rows import schema, table_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.sources.partition import ContentDigest, Partition, read_rows
from surge_dagster.engine.store.local_store import LocalStore

_THREADS = 4  # of a run's publisher on a local disk
_PILOT_TEXTS = 200


class PoolTexts:
    """Calls of this engine's pool for texts that lie in no slot: they are copied into one, which
    grows as needed."""

    def __init__(self, pool: MeteredPool) -> None:
        self.space: Space = pool.space
        self._pool = pool
        self._arena: Arena | None = None
        self._slot: Slot | None = None

    def encode(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Return vectors [texts, dimension] in shared memory, valid until the next call."""
        slot = self._empty_slot(len(texts), texts.nbytes)
        slot.append(texts)
        if len(texts):
            self._pool.submit(slot).result()
        return slot.matrix(0, len(slot))

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()

    def _empty_slot(self, texts: int, text_bytes: int) -> Slot:
        if self._slot is not None:
            self._slot.truncate(0)
            free_texts, free_bytes = self._slot.room
            if texts <= free_texts and text_bytes <= free_bytes:
                return self._slot
            texts = max(texts, 2 * free_texts)
            text_bytes = max(text_bytes, 2 * free_bytes)
        self.close()
        self._arena = self._pool.arena(
            slots=1, max_texts=max(1, texts), max_bytes=max(1, text_bytes)
        )
        self._slot = self._arena.acquire()
        return self._slot


class LibraryTexts:
    """Calls of sentence-transformers' multi-process pool: what people have without this engine."""

    def __init__(self, space: Space) -> None:
        pilot = short_workload(_PILOT_TEXTS).texts
        self.space = space
        self.meter = Meter()
        self._peer = SentenceTransformersPool(Setting(space, Path(space.model_path), pilot))

    def encode(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Return vectors, float32 [texts, dimension]."""
        begun = time.perf_counter()
        vectors = self._peer.encode(texts.to_pylist())
        self.meter.add_call(begun, len(texts))
        return vectors

    def close(self) -> None:
        self._peer.close()


Encoder = PoolTexts | LibraryTexts


@dataclass(frozen=True, slots=True)
class Gathered:
    """All rows of a partition, in memory."""

    partition: Partition
    digest: str
    ids: list[pa.Array]
    texts: pa.LargeStringArray

    def __len__(self) -> int:
        return len(self.texts)


def gather(partition: Partition) -> Gathered:
    """Read a partition whole."""
    digest = ContentDigest()
    ids = []
    texts = []
    for batch in read_rows(partition):
        digest.update(batch)
        ids.append(batch.ids)
        texts.append(batch.texts)
    return Gathered(partition, digest.hexdigest(), ids, _joined(texts))


class Files:
    """Writes whole partitions as the files of a space."""

    def __init__(self, store: LocalStore, space: Space) -> None:
        self._store = store
        self._space = claim_space(store, space)
        self._threads = ThreadPoolExecutor(_THREADS)

    def write(
        self,
        gathered: Sequence[Gathered],
        vectors: np.ndarray,
        order: np.ndarray | None = None,
    ) -> None:
        """Write partitions, and flush the folder.

        Args:
            vectors: of all their rows, [rows, dimension].
            order: the place in `vectors` of each row's vector, int64 [rows]; None if they have
                the same order.
        """

        def write(rows: Gathered, stop: int) -> None:
            part = slice(stop - len(rows), stop)
            if order is None:
                self._write(rows, vectors[part])
            else:
                self._write(rows, vectors[order[part]])

        for _ in self._threads.map(write, gathered, accumulate(map(len, gathered))):
            pass
        self._store.sync(self._space.name)

    def _write(self, gathered: Gathered, matrix: np.ndarray) -> None:
        key = gathered.partition.key
        space = self._space.name
        digest = gathered.digest
        rows, dimension = matrix.shape
        facts = FileFacts(
            key,
            space,
            self._space.requested.model,
            "fp32",
            gathered.partition.source_version,
            digest,
            desired_version(digest, space),
            rows,
            dimension,
            0,
        )
        id_type = gathered.ids[0].type if gathered.ids else pa.string()
        columns = schema(id_type, dimension, str(matrix.dtype), include_text=True)
        table = table_of(columns, gathered.ids, gathered.texts, matrix)
        with self._store.create(file_name(space, key)) as upload:
            write_file(upload.sink, columns, facts, [table])
            upload.publish(lambda: None)

    def close(self) -> None:
        self._threads.shutdown()


def partition_by_partition(
    partitions: Iterable[Partition], encoder: Encoder, files: Files, batch: int
) -> None:
    """PBP; `batch` has no meaning."""
    for gathered in map(gather, partitions):
        files.write([gathered], encoder.encode(gathered.texts))


def fixed_size_batches(
    partitions: Iterable[Partition], encoder: Encoder, files: Files, batch: int
) -> None:
    """FSB with B = `batch`; regrouping copies the vectors of a partition once more."""
    gathered = list(map(gather, partitions))
    texts = pa.chunked_array([rows.texts for rows in gathered], pa.large_string())
    labels = np.repeat(np.arange(len(gathered)), list(map(len, gathered)))
    vectors = np.empty((len(texts), encoder.space.dimension), encoder.space.dtype)
    for start in range(0, len(texts), batch):
        part = texts.slice(start, batch)
        vectors[start : start + len(part)] = encoder.encode(_joined(part.chunks))
    files.write(gathered, vectors, np.argsort(labels, kind="stable"))


def packed_partitions(
    partitions: Iterable[Partition], encoder: Encoder, files: Files, batch: int
) -> None:
    """PB-PBP-LB with B = `batch`."""
    for packed in first_fit_decreasing(list(partitions), batch):
        gathered = list(map(gather, packed))
        files.write(gathered, encoder.encode(_joined([rows.texts for rows in gathered])))


def first_fit_decreasing(partitions: Sequence[Partition], capacity: int) -> list[list[Partition]]:
    """Pack partitions, largest first, each into the first bin that has room.

    A partition above the capacity has a bin of its own, because partitions are not split.
    """
    rooms: list[int] = []
    bins: list[list[Partition]] = []
    for partition in sorted(partitions, key=lambda partition: -(partition.rows or 0)):
        size = min(partition.rows or 0, capacity)
        first = next((number for number, room in enumerate(rooms) if size <= room), len(rooms))
        if first == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[first].append(partition)
        rooms[first] -= size
    return bins


def _joined(texts: Sequence[pa.LargeStringArray]) -> pa.LargeStringArray:
    joined: Any = pa.chunked_array(texts, pa.large_string()).combine_chunks()
    return joined
