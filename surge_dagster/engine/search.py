"""The nearest texts of a space, by reading all of it: for looking at a result, not for serving queries."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import format_of, open_output_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import UNREADABLE


@dataclass(frozen=True, slots=True, order=True)
class Hit:
    """A row that is near a query; `score` is the cosine, `text` is empty where the file has no text column."""

    score: float
    key: str
    id: str
    text: str


def search(store: Store, pool: EncoderPool, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
    """The `k` nearest rows of the pool's space for each query, best first.

    A text that stands in several rows is given once, with the first of them.

    Raises:
        ConfigError: the output holds nothing of this space, or a file of it cannot be read.
    """
    listed = sorted(stored.name for stored in store.list(pool.space.name) if format_of(stored.name))
    # A file of the other format is a stray that nobody reads.
    file_format = named_space(store, pool.space.name).file_format if listed else "parquet"
    names = [name for name in listed if format_of(name) == file_format]
    if not names:
        raise ConfigError(
            f"{store.url!r} holds no embeddings of the space {pool.space.name}. Run `surge-dagster embed`."
        )
    vectors = _encode(pool, queries)
    best: list[list[Hit]] = [[] for _ in queries]
    for name in names:
        try:
            with store.open(name) as file, open_output_file(file, file_format) as reader:
                key = reader.facts.partition_key
                for batch in reader.read():
                    _collect(best, vectors, batch, key, k)
        except (InvalidFile, *UNREADABLE) as error:
            raise ConfigError(
                f"{store.location(name)!r} cannot be read: {error}. `surge-dagster verify` tells what is wrong."
            ) from error
    return [sorted(hits, reverse=True) for hits in best]


def _encode(pool: EncoderPool, queries: Sequence[str]) -> np.ndarray:
    texts = pa.array(queries, pa.large_string())
    with pool.arena(slots=1, max_texts=len(queries), max_bytes=max(1, texts.nbytes)) as arena:
        slot = arena.acquire()
        slot.append(texts)  # pyright: ignore[reportArgumentType]
        pool.encode(slot)
        vectors = slot.matrix(0, len(slot)).astype(np.float32)
        slot.release()
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _collect(best: list[list[Hit]], vectors: np.ndarray, batch: pa.RecordBatch, key: str, k: int) -> None:
    matrix = matrix_of(batch).astype(np.float32, copy=False)
    lengths = np.maximum(np.linalg.norm(matrix, axis=1), np.finfo(np.float32).tiny)
    texts = batch.column("text") if "text" in batch.schema.names else None
    for hits, scores in zip(best, (matrix @ vectors.T / lengths[:, None]).T, strict=True):
        for row in np.argsort(-scores, kind="stable")[: 4 * k]:
            score = float(scores[row])
            if len(hits) == k and score <= hits[0].score:
                break
            text = texts[int(row)].as_py() if texts is not None else ""
            if text and any(hit.text == text for hit in hits):
                continue
            hit = Hit(score, key, str(batch.column("id")[int(row)].as_py()), text)
            heapq.heappush(hits, hit) if len(hits) < k else heapq.heapreplace(hits, hit)
