"""What an encode call does not encode: equal texts again, and rows whose old vectors pass the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.encoder.known_vectors import KnownVectors
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.run.failures import DroppedPartitions
from surge_dagster.engine.run.memory import ResultMemory
from surge_dagster.engine.run.superbatch import PartitionToRead, Segment, SuperBatch
from surge_dagster.engine.run.superbatch_call import SuperBatchCall
from surge_dagster.engine.support.ledger import Ledger
from tests.engine.encoder import faults
from tests.engine.encoder.faulty_pools import faulty_pool
from tests.engine.runs import read_of
from tests.small_catalogs import DIMENSION, partition_of

KILLER = "die always"


@pytest.fixture
def faulty_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers find the backend of `faults.py`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(faults.__file__).parent))


def call_of(
    pool: Any, batch: SuperBatch, dropped: DroppedPartitions | None = None, limit: int = 1 << 30
) -> SuperBatchCall:
    """A call in a run whose other stages hold no memory."""
    plan = SimpleNamespace(result=ResultMemory(DIMENSION, 4, threads=2, upload_bytes=0))
    memory: Any = SimpleNamespace(ledger=Ledger(limit), plan=plan)
    return SuperBatchCall(pool, batch, memory, dropped or DroppedPartitions())


def read_again(dropped: DroppedPartitions) -> list[str]:
    return [partition.key for partition in dropped.to_read_again()]


@contextmanager
def batch_of(
    pool: EncoderPool, partitions: dict[str, list[str]], known: KnownVectors | None = None
) -> Iterator[SuperBatch]:
    """A SuperBatch of whole partitions."""
    texts = [text for each in partitions.values() for text in each]
    segments: list[Segment] = []
    for key, each in partitions.items():
        start = segments[-1].stop if segments else 0
        partition = PartitionToRead(partition_of(key, []))
        segments.append(Segment(partition, start, start + len(each), 0, (), read_of([])))
    with pool.arena(slots=1, max_texts=len(texts), max_bytes=1 << 16) as arena:
        slot = arena.acquire()
        slot.append(pa.array(texts, pa.large_string()), known=known)
        yield SuperBatch(0, slot, tuple(segments), 0)


def known(rows: list[int], vectors: np.ndarray, sampled: list[int]) -> KnownVectors:
    return KnownVectors(np.array(rows), vectors, np.zeros(len(rows), np.bool_), np.isin(rows, sampled))


def is_right(slot: Slot, texts: list[str]) -> np.ndarray:
    return (slot.matrix(0, len(texts)) == hash_vectors(texts, DIMENSION)).all(axis=1)


def test_equal_texts_of_a_superbatch_are_encoded_once(hash_pool: EncoderPool) -> None:
    partitions = {"a": ["one", "two", "one", ""], "b": ["two", "three", "", "one"]}
    with batch_of(hash_pool, partitions) as batch:
        call = call_of(hash_pool, batch)
        metrics = call.result()
        assert metrics is not None and (metrics.costs.texts_computed, call.deduplicated) == (4, 4)
        assert is_right(batch.slot, partitions["a"] + partitions["b"]).all()
        assert all(call.is_encoded(segment) for segment in batch.segments)


def test_texts_are_truncated_as_often_as_they_occur(hash_pool: EncoderPool) -> None:
    long = "x" * 4096
    with batch_of(hash_pool, {"a": [long, "short", long], "b": [long]}) as batch:
        call_of(hash_pool, batch).result()
        assert (batch.slot.truncation(0, 3).sum(), batch.slot.truncation(3, 4).sum()) == (2, 1)


def test_every_text_is_encoded_where_the_comparison_has_no_memory(hash_pool: EncoderPool) -> None:
    with batch_of(hash_pool, {"a": ["one", "one", "two"]}) as batch:
        call = call_of(hash_pool, batch, limit=100)
        metrics = call.result()
        assert metrics is not None and (metrics.costs.texts_computed, call.deduplicated) == (3, 0)
        assert is_right(batch.slot, ["one", "one", "two"]).all()


def test_rows_with_vectors_are_not_encoded_and_keep_them_bit_for_bit(hash_pool: EncoderPool) -> None:
    texts = [f"text {row}" for row in range(8)]
    nearly = hash_vectors(texts, DIMENSION)[[1, 2, 5, 6]] * np.float32(1 + 1e-6)
    with batch_of(
        hash_pool, {"a": texts[:4], "empty": [], "b": texts[4:]}, known([1, 2, 5, 6], nearly, [2, 5])
    ) as batch:
        call = call_of(hash_pool, batch)
        metrics = call.result()
        assert metrics is not None and metrics.costs.texts_computed == 4 + 2, "those without a vector, and the sample"
        assert np.array_equal(batch.slot.matrix(0, 8)[[1, 2, 5, 6]], nearly)
        assert is_right(batch.slot, texts)[[0, 3, 4, 7]].all()
        assert batch.slot.reused(0, 8) == 4
        assert {rows: len(cosines) for rows, cosines in call.cosines.items()} == {(0, 4): 1, (4, 8): 1}


def test_partition_whose_sample_differs_is_dropped_and_read_again(
    hash_pool: EncoderPool, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"text {row}" for row in range(8)]
    old = hash_vectors(texts, DIMENSION)
    old[5:] = -old[5:]
    dropped = DroppedPartitions()
    with batch_of(hash_pool, {"a": texts[:4], "b": texts[4:]}, known(list(range(1, 8)), old[1:], [2, 6])) as batch:
        metrics = call_of(hash_pool, batch, dropped).result()
        assert metrics is not None and metrics.costs.texts_computed == 1 + 2
        assert is_right(batch.slot, texts)[:4].all() and batch.slot.reused(0, 4) == 3
        assert [segment.partition in dropped for segment in batch.segments] == [False, True]
        [again] = dropped.to_read_again()
        assert (again.key, again.reuse, again.cosines) == ("b", False, (pytest.approx(-1, abs=1e-6),))
        assert [record.message.partition(":")[0] for record in caplog.records] == ["partition 'b'"]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_partitions_of_whose_sample_no_row_can_be_held_are_read_again(
    hash_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """There is memory for one sampled row, that of the first partition; "d" has no old vectors."""
    monkeypatch.setattr(ResultMemory, "of_rows", lambda self, rows, _: (rows + 1) * 4 * DIMENSION)
    texts = [f"text {row}" for row in range(8)]
    old = hash_vectors(texts, DIMENSION)[:6] * (-1 if is_wrong else 1)
    partitions = {"a": texts[:2], "b": texts[2:4], "c": texts[4:6], "d": texts[6:]}
    dropped = DroppedPartitions()
    with batch_of(hash_pool, partitions, known([0, 1, 2, 3, 4, 5], old, [0, 3, 4])) as batch:
        metrics = call_of(hash_pool, batch, dropped).result()
        assert metrics is not None and metrics.costs.texts_computed == 1 + 2, "one sample, and those without vectors"
        assert np.array_equal(batch.slot.matrix(0, 6), old)
        assert sorted(read_again(dropped)) == (["a", "b", "c"] if is_wrong else ["b", "c"])


@pytest.mark.usefixtures("faulty_workers")
def test_text_that_waited_for_a_failed_partition_is_encoded_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = {"bad": ["shared", KILLER, "own"], "good": ["other", "shared"], "bad too": [KILLER, "shared"]}
    texts = [text for each in partitions.values() for text in each]
    with faulty_pool() as pool, batch_of(pool, partitions) as batch:
        call = call_of(pool, batch)
        metrics = call.result()
        assert metrics is not None
        assert {row.row for row in metrics.failed} == {1, 5}
        assert is_right(batch.slot, texts)[3:5].all() and call.is_encoded(batch.segments[1])


@pytest.mark.usefixtures("faulty_workers")
def test_call_that_ends_early_counts_no_row_without_its_vector(tmp_path: Any) -> None:
    wait = f"wait {tmp_path / 'go'}"
    partitions = {"a": ["one", "two"], "b": [wait, "three"], "c": ["three"], "d": ["two"]}
    with faulty_pool() as pool, batch_of(pool, partitions) as batch:
        call = call_of(pool, batch)
        assert call.result(0.2) is None
        (tmp_path / "go").touch()
        call.end()
        right = is_right(batch.slot, [text for each in partitions.values() for text in each])
        for segment in batch.segments:
            assert not call.is_encoded(segment) or right[segment.start : segment.stop].all()


def test_rows_that_a_failed_pool_never_got_count_as_not_encoded(hash_pool: EncoderPool) -> None:
    """A second call that the pool refuses must not be taken for done, neither by `result` nor by `end`."""
    failed = EncodeMetrics(failed=(FailedRow(1, "it died"),))
    calls = iter([SimpleNamespace(result=lambda timeout_seconds=None: failed, encoded=[(2, 3)])])

    def submit(*arguments: Any) -> Any:
        for call in calls:
            return call
        raise EncoderError("the pool failed")

    with batch_of(hash_pool, {"bad": ["shared", "own"], "good": ["other", "shared"]}) as batch:
        call = call_of(SimpleNamespace(submit=submit, precision="fp32"), batch)
        for _ in range(2):
            with suppress(EncoderError):
                call.result()
        call.end()
        assert not call.is_encoded(batch.segments[1]), "one of its rows waits for the second call"
