"""The paper's baselines (SURGE, sections 2.2 and 5.3), with the product's files and any encoder of texts.

- PBP, partition by partition: a call for each, then its file.
- FSB, fixed-size batches: calls of B texts whatever partitions they belong to, and all vectors in memory until the last
  one is there; then rows are regrouped by the labels of their partitions, and all files are written.
- PB-PBP-LB, sorted first-fit-decreasing packing: whole partitions are packed into bins of B texts by their sizes, which
  must be known before the first call; a call for each bin, then its files.

Each reads, checks the content of, and writes the same partitions as a run does. Where several files are ready they are
written by as many threads as a run has, but the next call waits for them: the baselines overlap nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.facts import VectorFacts
from surge_dagster.engine.files.formats import write_file
from surge_dagster.engine.files.rows import FileRows
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.space_target import SpaceTarget, require_unchanged
from surge_dagster.engine.run.superbatch import OpenPartition
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition, read_rows
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.text_hash import text_hashes


class TextEncoder(Protocol):
    """Encodes texts in one call; its vectors, [texts, dimension], are valid until the next one."""

    space: Space
    precision: str
    workers: int

    def encode(self, texts: pa.LargeStringArray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Gathered:
    """All rows of a partition, in memory."""

    opened: OpenPartition
    ids: list[pa.Array]
    texts: pa.LargeStringArray

    def __len__(self) -> int:
        return len(self.texts)


class Files:
    """Writes whole partitions as the files of a space.

    Args:
        threads: that write concurrently.
    """

    def __init__(self, store: Store, space: Space, precision: str, threads: int) -> None:
        self._target = SpaceTarget(store, claim_space(store, space), precision, include_text=True)
        self._threads = ThreadPoolExecutor(threads)

    def write(self, gathered: Sequence[Gathered], vectors: np.ndarray, order: np.ndarray | None = None) -> None:
        """Write partitions, and flush the folder.

        Args:
            vectors: of all their rows, [rows, dimension].
            order: where in `vectors` those of each row are, int64 [rows]; None where they are in the same order.
        """

        def write(one: Gathered, part: slice) -> None:
            self._write(one, vectors[part] if order is None else vectors[order[part]])

        for _ in self._threads.map(write, gathered, _slices(gathered)):
            pass
        self._target.sync()

    def _write(self, gathered: Gathered, matrix: np.ndarray) -> None:
        opened, now = gathered.opened, datetime.now(UTC).isoformat(timespec="seconds")
        id_type, hashes = opened.id_type or pa.string(), text_hashes(gathered.texts)
        rows = FileRows(gathered.ids, id_type, gathered.texts, hashes, matrix)
        vectors = VectorFacts(rows_encoded=len(matrix), oldest_encoded_at=now)
        facts = self._target.facts(opened, rows=len(matrix), vectors=vectors)
        with self._target.create(opened.key) as upload:
            write_file(self._target.space.file_format, upload, rows, facts)
            upload.publish(lambda: require_unchanged(opened.source))

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()


def partition_by_partition(partitions: Iterable[Partition], encoder: TextEncoder, files: Files, batch: int) -> None:
    """PBP; `batch` has no meaning."""
    for gathered in map(gather, partitions):
        files.write([gathered], encoder.encode(gathered.texts))


def fixed_size_batches(partitions: Iterable[Partition], encoder: TextEncoder, files: Files, batch: int) -> None:
    """FSB with B = `batch`; the files of a regrouped partition need one more copy of its vectors."""
    gathered = list(map(gather, partitions))
    texts = pa.chunked_array([one.texts for one in gathered], pa.large_string())
    labels = np.repeat(np.arange(len(gathered)), list(map(len, gathered)))
    vectors = np.empty((len(texts), encoder.space.dimension), encoder.space.dtype)
    for start in range(0, len(texts), batch):
        part = texts.slice(start, batch)
        vectors[start : start + len(part)] = encoder.encode(_joined(part.chunks))
    files.write(gathered, vectors, np.argsort(labels, kind="stable"))


def packed_partitions(partitions: Iterable[Partition], encoder: TextEncoder, files: Files, batch: int) -> None:
    """PB-PBP-LB with B = `batch`.

    Raises:
        ValueError: the source does not know how many rows a partition has.
    """
    listed = list(partitions)
    sizes = [one.rows for one in listed if one.rows is not None]
    if len(sizes) < len(listed):
        raise ValueError("packing needs the sizes of all partitions before the first is read, and this source has none")
    for packed in first_fit_decreasing(sizes, batch):
        gathered = [gather(listed[place]) for place in packed]
        files.write(gathered, encoder.encode(_joined([one.texts for one in gathered])))


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sizes, largest first, each into the first bin that has room; O(n log n).

    A size above the capacity has a bin of its own, because partitions are not split.

    Returns:
        The places in `sizes` of what each bin holds.
    """
    # A tree over the bins: each node has the most room of any bin below it, so the first bin is found from the root.
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        size = min(sizes[place], capacity)
        node = 1
        while node < leaves:
            node = 2 * node if size <= room[2 * node] else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(place)
        room[node] -= size
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def gather(partition: Partition) -> Gathered:
    """Read a partition whole."""
    opened, digest = OpenPartition(partition), ContentDigest()
    ids: list[pa.Array] = []
    texts: list[pa.LargeStringArray] = []
    for batch in read_rows(partition):
        digest.update(batch)
        opened.missing.count(batch)
        opened.id_type = batch.ids.type
        ids.append(batch.ids)
        texts.append(batch.texts)
    opened.content_digest = digest.hexdigest()
    return Gathered(opened, ids, _joined(texts))


def _slices(gathered: Sequence[Gathered]) -> Iterator[slice]:
    """Where the rows of each lie among the rows of all."""
    return (slice(*borders) for borders in pairwise(accumulate(map(len, gathered), initial=0)))


def _joined(texts: Sequence[pa.LargeStringArray]) -> pa.LargeStringArray:
    return pa.concat_arrays(texts) if texts else pa.array([], pa.large_string())  # pyright: ignore[reportReturnType]
