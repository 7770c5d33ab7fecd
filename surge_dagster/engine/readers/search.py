"""Search for the nearest texts by reading a whole space: to inspect a result, not to serve."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import comparable, cut
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import open_listed
from surge_dagster.engine.files.rows import OWN_COLUMNS, matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.output.spaces import space_of_spec
from surge_dagster.engine.readers.loading import Embeddings
from surge_dagster.engine.store.store import Store

_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Hit:
    """A row near a query.

    Attributes:
        score: the cosine.
        truncated: whether the vector is of only a part of the text.
        columns: carried from the source.
    """

    score: float
    key: str
    id: str
    text: str
    truncated: bool
    columns: dict[str, Any] = field(default_factory=dict)


def search(
    store: Store,
    pool: EncoderPool,
    queries: Sequence[str],
    k: int = 5,
    space: Space | None = None,
    *,
    removed: bool = False,
    documents: bool = False,
) -> list[list[Hit]]:
    """Return the `k` nearest rows of a space for each query, best first.

    Equal texts give one hit. Queries of a derived space are cut as its vectors are, and stay
    float32: int8 values count as the numbers they stand for, and bits as 1 or -1.

    Args:
        pool: for queries: `EncoderPool(spec, task="query")`.
        space: one that is derived from the pool's; None is the pool's own.
        removed: also search partitions that were removed from the source and still have files.
        documents: of a space with chunks, return only the best chunk of each document.

    Raises:
        ConfigError: the pool encodes documents or into another space, or the space has no files,
            or with `documents` no chunks.
    """
    _require_queries(pool)
    space = space or _space_of(store, pool)
    if documents and space.requested.chunks is None:
        raise ConfigError(
            f"the rows of the space {space.name} are not chunks of documents. Search it without "
            "documents."
        )
    files = Embeddings(store, space, removed=removed).files()
    if not files:
        raise ConfigError(
            f"{store.url!r} has no embeddings of the space {space.name}. Run `surge-dagster embed`."
        )
    vectors = _query_vectors(pool, queries, space)
    nearest_of_each = [_Nearest(k, documents=documents) for _ in queries]
    for file in files:
        with open_listed(store, space, file) as reader:
            for batch in reader.read():
                scores_of_each = _cosines(vectors, batch, space)
                for nearest, scores in zip(nearest_of_each, scores_of_each, strict=True):
                    nearest.add(scores, batch, reader.facts.partition_key)
    return [nearest.hits for nearest in nearest_of_each]


def _require_queries(pool: EncoderPool) -> None:
    if pool.space.side != replace(pool.space, task="query").side:
        raise ConfigError(
            "this model encodes queries in another way than documents. Start the pool with "
            'task="query".'
        )


def _query_vectors(pool: EncoderPool, queries: Sequence[str], space: Space) -> np.ndarray:
    """Return vectors of length 1, float32 [queries, dimension]."""
    if space.encoder_sha256 != pool.space.spec_sha256:
        raise ConfigError(
            f"the pool encodes queries of {pool.space.name}, and the space is {space.name}. Start "
            "the pool with the model of that space."
        )
    space.require_tokenizer(pool.start().tokenizer)
    vectors = cut(pool.vectors(pa.array(queries, pa.large_string())), space)  # pyright: ignore[reportArgumentType]
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)
    return vectors


def _space_of(store: Store, pool: EncoderPool) -> Space:
    """Return the pool's space, whose slug may be that of another name of the model's folder."""
    space = space_of_spec(store, pool.space.spec_sha256)
    return space or named_space(store, pool.space.name)


def _cosines(queries: np.ndarray, batch: pa.RecordBatch, space: Space) -> np.ndarray:
    """Return the cosines of the rows of a batch to queries of length 1, [queries, rows]."""
    if not batch.num_rows:
        return np.empty((len(queries), 0), np.float32)
    matrix = comparable(matrix_of(batch), space)
    return queries @ matrix.T / np.maximum(np.linalg.norm(matrix, axis=1), _TINY)


def _value(column: pa.Array, row: int) -> Any:
    """Return a value as an object of Python, or as text for times that Python does not have."""
    try:
        return column[row].as_py()
    except (OverflowError, ValueError):
        return column.slice(row, 1).to_string(skip_new_lines=True).strip("[]")


class _Nearest:
    """The `k` best hits of one query among the rows added so far."""

    def __init__(self, k: int, *, documents: bool) -> None:
        self._k = k
        self._documents = documents
        # Best first, by text or document; by key and id if the file has no texts.
        self._hits: dict[Hashable, Hit] = {}

    @property
    def hits(self) -> list[Hit]:
        return list(self._hits.values())

    def add(self, scores: np.ndarray, batch: pa.RecordBatch, key: str) -> None:
        found: dict[Hashable, Hit] = {}
        for row in np.argsort(-scores, kind="stable").tolist():
            is_lower = len(self._hits) == self._k and scores[row] <= self.hits[-1].score
            if len(found) == self._k or is_lower:
                break
            hit = _hit(float(scores[row]), batch, row, key)
            found.setdefault(self._identity(hit), hit)

        candidates = [*self._hits.items(), *found.items()]
        self._hits = {}
        for identity, hit in sorted(candidates, key=lambda candidate: -candidate[1].score):
            if len(self._hits) < self._k:
                self._hits.setdefault(identity, hit)

    def _identity(self, hit: Hit) -> Hashable:
        if self._documents:
            return hit.key, hit.columns["document_id"]
        return hit.text or (hit.key, hit.id)


def _hit(score: float, batch: pa.RecordBatch, row: int, key: str) -> Hit:
    names = batch.schema.names
    text = batch.column("text")[row].as_py() if "text" in names else ""
    carried = {name: _value(batch.column(name), row) for name in names if name not in OWN_COLUMNS}
    return Hit(
        score,
        key,
        id=str(batch.column("id")[row].as_py()),
        text=text,
        truncated=batch.column("truncated")[row].as_py(),
        columns=carried,
    )
