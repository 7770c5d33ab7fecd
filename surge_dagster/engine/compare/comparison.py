"""Compare what searches find in two spaces, before readers are switched from one to the other.

Every query is compared with every row of both spaces: exactly, in one pass over the files of each,
a block of rows at a time. Only partitions that both spaces have with the same rows count, since
fewer rows make a search easier. Rows with the same text count as one row, as in a search; if one
of the spaces has chunks, the chunks of a document do.

Labels form one pool for both spaces: nDCG values of two pools cannot be compared. Rows without a
label count as not relevant, so the result says how many of the found rows were judged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from surge_dagster.engine.compare.judging import LabelPool, judge
from surge_dagster.engine.compare.metrics import DEPTH, overlap, rank_correlation
from surge_dagster.engine.compare.queries import Query, draw_queries
from surge_dagster.engine.compare.report import ComparedQuery, Comparison
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.rows import OWN_COLUMNS
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.readers.loading import Embeddings
from surge_dagster.engine.readers.search import (
    Hit,
    Nearest,
    add_to_each,
    query_vectors,
    rows_of,
    unit_vectors,
)
from surge_dagster.engine.store.store import Store

OpenPool = Callable[[Space], AbstractContextManager[EncoderPool]]
Hits = Mapping[Hashable, Hit]
SAMPLE = 200  # rows to draw, unless a number is given
_BLOCK_BYTES = 64 * 1024 * 1024
_MOST_BLOCK_ROWS = 1024
_SHOWN = 10
_SHOWN_HITS = 3
_SHOWN_CHARACTERS = 100


def compare(
    store: Store,
    first: Space,
    second: Space,
    queries: Sequence[Query] | int,
    open_pool: OpenPool,
    *,
    k: int = DEPTH,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> Comparison:
    """Return how the results of two spaces differ, and with labels, which ones are better.

    Args:
        queries: from `read_queries`, or the number of rows to draw, whose texts are the queries. If
            the second space is derived from the first one, or the same, drawn rows are looked up by
            their own vectors, without a model.
        open_pool: gives a pool that encodes queries for a space.
        k: rows that count for recall and for the reciprocal rank.

    Raises:
        ConfigError: the spaces share no rows, no label names one of them, or a label names several.
    """
    sides = _sides(store, first, second)
    vectors: list[np.ndarray] | None = None
    if isinstance(queries, int):
        queries = _drawn(sides[0], queries)
        if first.derived is None and second.encoder_sha256 == first.spec_sha256:
            drawn = np.array([query.vector for query in queries])
            vectors = [unit_vectors(drawn, side.space) for side in sides]
    if vectors is None:
        vectors = _encoded(sides, queries, open_pool)

    pool = LabelPool(queries)
    hits = _find_hits(sides, queries, vectors, pool, max(k, DEPTH), progress)
    return _compared(sides, queries, hits, pool, k)


def _find_hits(
    sides: Sequence[_Side],
    queries: Sequence[Query],
    vectors: Sequence[np.ndarray],
    pool: LabelPool,
    depth: int,
    progress: Callable[[int, int | None], None],
) -> list[list[Hits]]:
    """Return the hits of each query in each space; `pool` gets the rows that labels name."""
    total = sum(side.rows for side in sides)
    hits: list[list[Hits]] = []
    done = 0
    for side, of_side in zip(sides, vectors, strict=True):
        nearest_of_each = [Nearest(depth + 1, side.identify) for _ in queries]
        for key, batch in side.blocks(len(queries)):
            if side is sides[0]:  # the other one has the same rows
                pool.find(key, batch, side.id_column, side.identify)
            add_to_each(nearest_of_each, of_side, key, batch, side.space)
            done += len(batch)
            progress(done, total)
        hits.append(_without_own(queries, nearest_of_each, depth))
    return hits


def _compared(
    sides: Sequence[_Side],
    queries: Sequence[Query],
    hits: Sequence[Sequence[Hits]],
    pool: LabelPool,
    k: int,
) -> Comparison:
    """Return what the hits of each query in each space tell."""
    results = [[list(each) for each in of_side] for of_side in hits]
    pairs = [(one[:DEPTH], other[:DEPTH]) for one, other in zip(*results, strict=True)]
    overlaps = [overlap(*pair) for pair in pairs]
    return Comparison(
        first=sides[0].space.name,
        second=sides[1].space.name,
        queries=len(queries),
        rows=sides[0].rows,
        partitions=len(sides[0].files),
        partitions_left_out=sides[0].partitions_left_out,
        overlap_at_10=float(np.mean(overlaps)),
        rank_correlation=float(np.mean([rank_correlation(*pair) for pair in pairs])),
        differing=_differing(queries, hits, overlaps),
        judged=judge(queries, results, pool, k),
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two spaces.

    Attributes:
        files: of the partitions with the same rows in both spaces.
        by_document: whether the chunks of a document are one row.
    """

    store: Store
    space: Space
    files: list[PublishedFile]
    partitions_left_out: int
    by_document: bool

    @property
    def rows(self) -> int:
        return sum(file.facts.rows for file in self.files)

    @property
    def id_column(self) -> str:
        """The column with what labels name."""
        return "id" if self.space.requested.chunks is None else "document_id"

    @property
    def columns(self) -> list[str]:
        return list({*OWN_COLUMNS, self.id_column})

    def identify(self, batch: pa.RecordBatch, row: int, key: str) -> Hashable:
        if self.by_document:
            return key, batch.column(self.id_column)[row].as_py()
        return batch.column("text_hash")[row].as_py()

    def blocks(self, queries: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        return blocks_of(self.store, self.space, self.files, self.columns, queries)


def blocks_of(
    store: Store, space: Space, files: Sequence[PublishedFile], columns: list[str], queries: int
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield all rows of files for a number of queries, with the key of their partition; a block,
    its vectors and its scores take at most 64 MiB."""
    row_bytes = 8 * (queries + space.dimension)
    rows = max(1, min(_MOST_BLOCK_ROWS, _BLOCK_BYTES // row_bytes))
    return rows_of(store, space, files, columns, rows)


def _sides(store: Store, first: Space, second: Space) -> list[_Side]:
    by_document = any(space.requested.chunks is not None for space in (first, second))
    files = [_by_key(store, space) for space in (first, second)]
    shared: list[str] = []
    for key in sorted(files[0].keys() & files[1].keys()):
        digests = {each[key].facts.content_digest for each in files}
        if by_document or len(digests) == 1:
            shared.append(key)
    if not any(files[0][key].facts.rows for key in shared):
        raise ConfigError(
            f"the spaces {first.name} and {second.name} have no partition with the same rows. "
            "Embed the catalog in both (`surge-dagster embed`), then compare."
        )
    left_out = len(files[0].keys() | files[1].keys()) - len(shared)
    sides: list[_Side] = []
    for space, of_space in zip((first, second), files, strict=True):
        own = [of_space[key] for key in shared]
        sides.append(_Side(store, space, own, left_out, by_document))
    return sides


def _by_key(store: Store, space: Space) -> dict[str, PublishedFile]:
    files = Embeddings(store, space).files()
    return {file.facts.partition_key: file for file in files}


def _drawn(side: _Side, count: int) -> list[Query]:
    return draw_queries(side.store, side.space, side.files, count, side.columns, side.identify)


def _encoded(
    sides: Sequence[_Side], queries: Sequence[Query], open_pool: OpenPool
) -> list[np.ndarray]:
    """Return the vectors of the queries in each space, [queries, dimension]."""
    texts = [query.text for query in queries]
    if not all(texts):
        raise ConfigError(
            f"the files of {sides[0].space.name} have no texts to draw queries from. Give a file "
            "of queries."
        )
    vectors: list[np.ndarray] = []
    for side in sides:
        with open_pool(side.space) as pool:
            vectors.append(query_vectors(pool, texts, side.space))
    return vectors


def _without_own(
    queries: Sequence[Query], nearest_of_each: Sequence[Nearest], depth: int
) -> list[Hits]:
    """Return the hits of each query; the row that a query was drawn from is not one of them."""
    results: list[Hits] = []
    for query, nearest in zip(queries, nearest_of_each, strict=True):
        others = ((row, hit) for row, hit in nearest.hits.items() if row != query.own)
        results.append(dict(islice(others, depth)))
    return results


def _differing(
    queries: Sequence[Query],
    hits: Sequence[Sequence[Hits]],
    overlaps: Sequence[float],
) -> tuple[ComparedQuery, ...]:
    """Return the queries whose results differ most, with the best rows of both spaces."""
    compared: list[ComparedQuery] = []
    for place in np.argsort(overlaps, kind="stable")[:_SHOWN].tolist():
        best = [islice(of_side[place].values(), _SHOWN_HITS) for of_side in hits]
        first, second = (tuple(map(_in_words, each)) for each in best)
        text = _shown(queries[place].text)
        compared.append(ComparedQuery(text, overlaps[place], first, second))
    return tuple(compared)


def _in_words(hit: Hit) -> str:
    return f"{hit.score:.3f} {hit.key} {hit.id} {_shown(hit.text)}".rstrip()


def _shown(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
