"""What an encode call does not encode: equal texts again, and rows whose old vectors pass the
comparison."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.arena import KnownVectors, Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.run.encoding import SuperBatchCall, _repeats
from surge_dagster.engine.run.superbatch import PartitionToRead, Segment, SuperBatch
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.text_hash import TEXT_HASH, text_hashes
from tests.engine.encoder.faulty_pools import faulty_pool
from tests.engine.runs import read_of
from tests.small_catalogs import DIMENSION, partition_of

KILLER = "die always"


def call_of(pool: Any, batch: SuperBatch, limit: int = 1 << 30) -> SuperBatchCall:
    """A call in a run whose other stages hold no memory."""
    memory: Any = SimpleNamespace(ledger=Ledger(limit))
    return SuperBatchCall(pool, batch, memory)


def all_texts(partitions: dict[str, list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(partitions.values()))


@contextlib.contextmanager
def batch_of(
    pool: EncoderPool, partitions: dict[str, list[str]], known: KnownVectors | None = None
) -> Iterator[SuperBatch]:
    """A SuperBatch of whole partitions."""
    texts = all_texts(partitions)
    segments: list[Segment] = []
    for key, each in partitions.items():
        start = segments[-1].stop if segments else 0
        partition = PartitionToRead(partition_of(key, []))
        segments.append(Segment(partition, start, start + len(each), 0, (), read_of([])))
    with pool.arena(slots=1, max_texts=len(texts), max_bytes=1 << 16) as arena:
        slot = arena.acquire()
        column = pa.array(texts, pa.large_string())
        slot.append(column, known=known)
        yield SuperBatch(0, slot, tuple(segments), 0, hashes=text_hashes(column))


def known(rows: list[int], vectors: np.ndarray) -> KnownVectors:
    return KnownVectors(np.array(rows), vectors, np.zeros(len(rows), np.bool_))


def is_right(slot: Slot, texts: list[str]) -> np.ndarray:
    return (slot.matrix(0, len(texts)) == hash_vectors(texts, DIMENSION)).all(axis=1)


def test_equal_texts_of_a_superbatch_are_encoded_once(hash_pool: EncoderPool) -> None:
    partitions = {"a": ["one", "two", "one", ""], "b": ["two", "three", "", "one"]}
    with batch_of(hash_pool, partitions) as batch:
        call = call_of(hash_pool, batch)
        metrics = call.result()
        assert metrics is not None
        assert metrics.costs.texts_computed == 4
        assert call.deduplicated == 4
        assert is_right(batch.slot, partitions["a"] + partitions["b"]).all()
        assert all(map(call.is_encoded, batch.segments))


def test_texts_whose_hashes_share_a_half_are_not_repeats() -> None:
    hashes = [b"one half" + bytes([row % 3]) * 8 for row in range(9)]
    column: Any = pa.array([b"z" * 16, *hashes], TEXT_HASH)[1:]

    repeats, originals = _repeats(column, np.arange(9), Ledger(1 << 20))

    assert repeats.tolist() == [3, 4, 5, 6, 7, 8]
    assert originals.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.usefixtures("faulty_workers")
def test_text_that_waited_for_a_failed_partition_is_encoded_for_its_own() -> None:
    partitions = {
        "bad": ["shared", KILLER, "own"],
        "good": ["other", "shared"],
        "bad too": [KILLER, "shared"],
    }
    texts = all_texts(partitions)
    with faulty_pool() as pool, batch_of(pool, partitions) as batch:
        call = call_of(pool, batch)
        metrics = call.result()
        assert metrics is not None
        first, second = metrics.failed
        assert {first.row, second.row} == {1, 5}
        assert is_right(batch.slot, texts)[3:5].all()
        assert call.is_encoded(batch.segments[1])


def test_texts_are_truncated_as_often_as_they_occur(hash_pool: EncoderPool) -> None:
    long = "x" * 4096
    with batch_of(hash_pool, {"a": [long, "short", long], "b": [long]}) as batch:
        call_of(hash_pool, batch).result()
        assert batch.slot.truncation(0, 3).sum() == 2
        assert batch.slot.truncation(3, 4).sum() == 1


def test_every_text_is_encoded_where_the_comparison_has_no_memory(hash_pool: EncoderPool) -> None:
    with batch_of(hash_pool, {"a": ["one", "one", "two"]}) as batch:
        call = call_of(hash_pool, batch, limit=100)
        metrics = call.result()
        assert metrics is not None
        assert (metrics.costs.texts_computed, call.deduplicated) == (3, 0)
        assert is_right(batch.slot, ["one", "one", "two"]).all()


def test_rows_with_vectors_are_not_encoded_and_keep_them_bit_for_bit(
    hash_pool: EncoderPool,
) -> None:
    texts = ["1", "2", "3", "4", "5", "6", "7", "8"]
    nearly = hash_vectors(texts, DIMENSION)[[1, 2, 5, 6]] * np.float32(1 + 1e-6)
    with batch_of(
        hash_pool, {"a": texts[:4], "empty": [], "b": texts[4:]}, known([1, 2, 5, 6], nearly)
    ) as batch:
        call = call_of(hash_pool, batch)
        metrics = call.result()
        assert metrics is not None
        assert metrics.costs.texts_computed == 4
        assert np.array_equal(batch.slot.matrix(0, 8)[[1, 2, 5, 6]], nearly)
        assert is_right(batch.slot, texts)[[0, 3, 4, 7]].all()
        assert batch.slot.is_known(0, 8).sum() == 4


@pytest.mark.usefixtures("faulty_workers")
def test_call_that_ends_early_counts_no_row_without_its_vector(tmp_path: Any) -> None:
    wait = f"wait {tmp_path / 'go'}"
    partitions = {"a": ["one", "two"], "b": [wait, "three"], "c": ["three"], "d": ["two"]}
    with faulty_pool() as pool, batch_of(pool, partitions) as batch:
        call = call_of(pool, batch)
        assert call.result(0.2) is None
        (tmp_path / "go").touch()
        call.abandon()
        right = is_right(batch.slot, all_texts(partitions))
        for segment in batch.segments:
            assert not call.is_encoded(segment) or right[segment.start : segment.stop].all()
