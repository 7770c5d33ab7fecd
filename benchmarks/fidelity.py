"""Compares vectors with those of fp32 sentence-transformers: cosines, and the share of equal nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.encoder.worker.parity import cosines

NEIGHBOURS = 10
_QUERIES = 1_000
_QUERIES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Cosines of rows to the reference's rows, and the share of equal top-10 neighbours (None: too few texts)."""

    lowest_cosine: float
    mean_cosine: float
    equal_neighbours: float | None


def compare(vectors: np.ndarray, reference: np.ndarray, texts: list[str]) -> Fidelity:
    """The fidelity of `vectors` to `reference`, row by row."""
    close = cosines(vectors, reference)
    return Fidelity(float(close.min()), float(close.mean()), equal_neighbours(vectors, reference, texts))


def equal_neighbours(ours: np.ndarray, theirs: np.ndarray, texts: list[str]) -> float | None:
    """Share of the ten nearest other texts that both matrices agree on, over up to 1,000 texts as queries.

    Equal texts have equal vectors in arbitrary order, so each distinct text counts once.
    """
    _, rows = np.unique(np.array(texts, dtype=object), return_index=True)
    if len(rows) <= NEIGHBOURS:
        return None
    queries = np.linspace(0, len(rows) - 1, min(_QUERIES, len(rows))).astype(np.int64)
    found = [_nearest(_unit(matrix[rows]), queries) for matrix in (ours, theirs)]
    same = [len(np.intersect1d(mine, other)) for mine, other in zip(*found, strict=True)]
    return float(np.mean(same)) / NEIGHBOURS


def _unit(matrix: np.ndarray) -> np.ndarray:
    matrix = matrix.astype(np.float32)
    return matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _nearest(matrix: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Rows of the ten largest cosines to each query, itself left out."""
    found = []
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        block = queries[start : start + _QUERIES_AT_ONCE]
        scores = matrix[block] @ matrix.T
        scores[np.arange(len(block)), block] = -np.inf
        found.append(np.argpartition(-scores, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS])
    return np.concatenate(found)
