"""Search for the nearest texts by reading a whole space: to inspect a result, not to serve."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import comparable, cut
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import PublishedFile, open_listed
from surge_dagster.engine.files.rows import OWN_COLUMNS, matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.output.spaces import space_of_spec
from surge_dagster.engine.readers.loading import Embeddings
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.printable import id_text

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
    require_queries(pool)
    space = space or _space_of(store, pool)
    space.require_probes(pool.space.probes)
    if documents and space.requested.chunks is None:
        raise ConfigError(
            f"the rows of the space {space.name} are not chunks of documents. Search it without "
            "documents."
        )
    files = _files_of(store, space, removed)
    vectors = query_vectors(pool, queries, space)
    identify = _document_of if documents else _text_of
    nearest_of_each = [Nearest(k, identify) for _ in queries]
    for key, batch in rows_of(store, space, files):
        add_to_each(nearest_of_each, vectors, key, batch, space)
    return [list(nearest.hits.values()) for nearest in nearest_of_each]


def _files_of(store: Store, space: Space, removed: bool) -> list[PublishedFile]:
    files = Embeddings(store, space, removed=removed).files()
    if not files:
        raise ConfigError(
            f"{store.url!r} has no embeddings of the space {space.name}. Run `surge-dagster embed`."
        )
    return files


def rows_of(
    store: Store,
    space: Space,
    files: Iterable[PublishedFile],
    columns: list[str] | None = None,
    batch_rows: int = 4096,
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of files with the key of their partition; columns that a file lacks are left
    out."""
    for file in files:
        with open_listed(store, space, file) as reader:
            present = columns and [name for name in columns if name in reader.columns.names]
            for batch in reader.read(columns=present, batch_rows=batch_rows):
                yield file.facts.partition_key, batch


def require_queries(pool: EncoderPool) -> None:
    """Raise `ConfigError` if the pool encodes documents in another way than queries."""
    if pool.space.side != replace(pool.space, task="query").side:
        raise ConfigError(
            "this model encodes queries in another way than documents. Start the pool with "
            'task="query".'
        )


def query_vectors(pool: EncoderPool, queries: Sequence[str], space: Space) -> np.ndarray:
    """Return vectors of length 1, float32 [queries, dimension]; errors are those of `search`."""
    require_queries(pool)
    if space.encoder_sha256 != pool.space.spec_sha256:
        raise ConfigError(
            f"the pool encodes queries of {pool.space.name}, and the space is {space.name}. Start "
            "the pool with the model of that space."
        )
    space.require_tokenizer(pool.start().tokenizer)
    texts = pa.array(queries, pa.large_string())
    return unit_vectors(pool.vectors(texts), space)  # pyright: ignore[reportArgumentType]


def unit_vectors(vectors: np.ndarray, space: Space) -> np.ndarray:
    """Return float32 vectors of a space or its parent, cut as its own are, with length 1."""
    vectors = cut(vectors, space)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)


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


def _text_of(batch: pa.RecordBatch, row: int, key: str) -> Hashable:
    """Return a row's text, or its key and id if its file has no texts."""
    text = batch.column("text")[row].as_py() if "text" in batch.schema.names else ""
    return text or (key, batch.column("id")[row].as_py())


def _document_of(batch: pa.RecordBatch, row: int, key: str) -> Hashable:
    """Return the key and id of a chunk's document."""
    return key, batch.column("document_id")[row].as_py()


class Nearest:
    """The `k` best hits of one query among the rows added so far.

    Args:
        identify: returns what a row of a batch is, given the key; it is hit once.

    Attributes:
        hits: best first, by identity.
    """

    def __init__(self, k: int, identify: Callable[[pa.RecordBatch, int, str], Hashable]) -> None:
        self._k = k
        self._identify = identify
        self._lowest = -np.inf
        self.hits: dict[Hashable, Hit] = {}

    def add(self, scores: np.ndarray, batch: pa.RecordBatch, key: str) -> None:
        higher = np.flatnonzero(scores > self._lowest)
        found: dict[Hashable, Hit] = {}
        for row in higher[np.argsort(-scores[higher], kind="stable")].tolist():
            if len(found) == self._k:
                break
            identity = self._identify(batch, row, key)
            if identity not in found:
                found[identity] = _hit(float(scores[row]), batch, row, key)
        if found:
            self._merge([*self.hits.items(), *found.items()])

    def _merge(self, candidates: list[tuple[Hashable, Hit]]) -> None:
        self.hits = {}
        for identity, hit in sorted(candidates, key=lambda candidate: -candidate[1].score):
            if len(self.hits) < self._k:
                self.hits.setdefault(identity, hit)
        if len(self.hits) == self._k:
            self._lowest = next(reversed(self.hits.values())).score


def add_to_each(
    nearest_of_each: Iterable[Nearest],
    queries: np.ndarray,
    key: str,
    batch: pa.RecordBatch,
    space: Space,
) -> None:
    """Compare the rows of a batch with queries of length 1, [queries, dimension]."""
    for nearest, scores in zip(nearest_of_each, _cosines(queries, batch, space), strict=True):
        nearest.add(scores, batch, key)


def _hit(score: float, batch: pa.RecordBatch, row: int, key: str) -> Hit:
    names = batch.schema.names
    text = batch.column("text")[row].as_py() if "text" in names else ""
    carried = {name: _value(batch.column(name), row) for name in names if name not in OWN_COLUMNS}
    return Hit(
        score,
        key,
        id=id_text(batch.column("id")[row].as_py()),
        text=text,
        truncated=batch.column("truncated")[row].as_py(),
        columns=carried,
    )
