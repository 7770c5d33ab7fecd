"""Search for the nearest texts by reading a whole space, to inspect a result; it is too slow to serve queries."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, open_output_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line

_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True, order=True)
class Hit:
    """A row near a query; `score` is the cosine, `text` is empty where the file has no text column."""

    score: float
    key: str
    id: str
    text: str


def search(store: Store, pool: EncoderPool, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
    """The `k` nearest rows of the pool's space for each query, best first.

    Several rows with the same text give one hit, the first of them.

    Raises:
        ConfigError: the output has no embeddings of this space, or one of its files cannot be read.
    """
    space = named_space(store, pool.space.name)
    files = OutputState(store, space.name, space.file_format).files()
    if not files:
        raise ConfigError(f"{store.url!r} holds no embeddings of the space {space.name}. Run `surge-dagster embed`.")
    vectors = pool.vectors(pa.array(queries, pa.large_string()))  # pyright: ignore[reportArgumentType]
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)
    best: list[list[Hit]] = [[] for _ in queries]
    for name, found in files.items():
        try:
            if not isinstance(found, PublishedFile):
                raise found
            with store.open(name) as file, open_output_file(file, space.file_format) as reader:
                for batch in reader.read():
                    _collect(best, vectors, batch, reader.facts.partition_key, k)
        except (InvalidFile, *UNREADABLE) as error:
            raise ConfigError(
                f"{store.location(name)!r} cannot be read: {first_line(error)}. `surge-dagster verify` reports what is "
                "wrong."
            ) from error
    return [sorted(hits, reverse=True) for hits in best]


def _collect(best: list[list[Hit]], vectors: np.ndarray, batch: pa.RecordBatch, key: str, k: int) -> None:
    matrix = matrix_of(batch).astype(np.float32, copy=False)
    lengths = np.maximum(np.linalg.norm(matrix, axis=1), _TINY)
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
