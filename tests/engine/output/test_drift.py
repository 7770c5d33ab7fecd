"""Drift: new vectors are compared with those that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.formats import file_name, read_published_file
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.drift import ALWAYS_COMPARED, SAMPLE_ROWS, DriftSample, compare_with_previous
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.superbatch import OpenPartition, Segment
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.thresholds import Thresholds
from tests.engine.runs import finish_receipts, make_run
from tests.small_catalogs import DIMENSION, Rows, numbered_rows, partition_of, rewrite, row_batch_of, with_vectors

ROWS = numbered_rows("a", 40)


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as started:
        yield started


@pytest.fixture
def output(pool: EncoderPool, tmp_path: Path) -> Path:
    """Holds partition "a" with `ROWS`."""
    finish_receipts(make_run(pool, [partition_of("a", ROWS)], tmp_path))
    return tmp_path


def compare(output: Path, pool: EncoderPool, rows: Rows = ROWS, room: int = 1 << 30, **given: Any) -> list[float]:
    store, ledger = open_store(output), Ledger(room)
    facts = None if "digest" in given else read_published_file(store, file_name(pool.space.name, "a")).facts
    batch = row_batch_of(rows)
    replaces = facts.content_digest if facts else given["digest"]
    opened = OpenPartition(partition_of("a", rows), id_type=batch.ids.type, replaces=replaces)
    found = compare_with_previous(
        store,
        pool.space,
        Segment(opened, 0, len(batch), 0, (batch.ids[:5], batch.ids[5:]), last=True),
        batch.texts,
        hash_vectors([row[1] for row in rows], DIMENSION),
        ledger,
    )
    assert ledger.held == 0
    return found


def tamper(output: Path, pool: EncoderPool) -> None:
    """Rotate the components of the vectors in the file of "a"."""
    path = output / file_name(pool.space.name, "a")
    rewrite(path, lambda table: with_vectors(table, lambda matrix: np.roll(matrix, 1, axis=1)))


def test_unchanged_texts_have_a_cosine_of_one(output: Path, pool: EncoderPool) -> None:
    found = compare(output, pool)
    assert found == pytest.approx([1] * SAMPLE_ROWS, abs=1e-6)


def test_other_vector_of_the_same_text_lowers_the_cosine(output: Path, pool: EncoderPool) -> None:
    tamper(output, pool)
    found = compare(output, pool)
    assert len(found) == SAMPLE_ROWS and np.mean(found) < 0.9


def test_rows_are_compared_by_id_in_any_order(output: Path, pool: EncoderPool) -> None:
    found = compare(output, pool, [("new", "new text"), *reversed(ROWS)])
    assert found == pytest.approx([1] * SAMPLE_ROWS, abs=1e-6)


def test_texts_that_have_changed_are_not_compared(output: Path, pool: EncoderPool) -> None:
    assert compare(output, pool, [(row_id, f"{text}!") for row_id, text in ROWS]) == []
    some = [(row_id, text if place < 4 else f"{text}!") for place, (row_id, text) in enumerate(ROWS)]
    found = compare(output, pool, some)
    assert len(found) == 4


def test_file_replaced_after_the_listing_is_not_compared(output: Path, pool: EncoderPool) -> None:
    assert compare(output, pool, digest="another writer's") == []


def test_comparison_without_free_memory_is_skipped(output: Path, pool: EncoderPool) -> None:
    assert compare(output, pool, room=10) == []


def test_damaged_or_missing_file_is_not_compared(output: Path, pool: EncoderPool) -> None:
    path = output / file_name(pool.space.name, "a")
    facts = read_published_file(open_store(output), file_name(pool.space.name, "a")).facts
    content = bytearray(path.read_bytes())
    for place in range(4, len(content) // 2):
        content[place] ^= 0xFF
    path.write_bytes(content)
    assert compare(output, pool, digest=facts.content_digest) == []
    path.unlink()
    assert compare(output, pool, digest=facts.content_digest) == []


def test_store_error_in_a_comparison_fails_no_partition(
    output: Path, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TransientError("the old file was replaced while it was read")

    monkeypatch.setattr(LocalStore, "open", fail)
    assert compare(output, pool, digest="any") == []


def test_sample_has_all_first_partitions_and_few_later_ones_reproducibly() -> None:
    keys = [f"partition {number}" for number in range(40_000)]
    first, second, other = DriftSample(), DriftSample(), DriftSample(seed=1)
    drawn = [key for key in keys if first.takes(key)]
    assert drawn[:ALWAYS_COMPARED] == keys[:ALWAYS_COMPARED]
    assert ALWAYS_COMPARED < len(drawn) < 12 * ALWAYS_COMPARED
    assert drawn == [key for key in keys if second.takes(key)] != [key for key in keys if other.takes(key)]


@pytest.mark.parametrize("bounds", [Thresholds(b_min=50, b_max=100), Thresholds(b_min=5, b_max=10)])
def test_run_compares_whole_and_split_partitions_that_it_replaces(
    output: Path, pool: EncoderPool, bounds: Thresholds
) -> None:
    tamper(output, pool)
    changed = [partition_of("a", [*ROWS, ("new", "new")], version="v2"), partition_of("b", numbered_rows("b", 3))]
    old, new = finish_receipts(make_run(pool, changed, output, bounds), "encoded")
    old, new = sorted((old, new), key=lambda receipt: receipt.key)
    assert old.compared_rows == SAMPLE_ROWS and old.previous_cosine is not None and old.previous_cosine < 0.9
    assert (new.compared_rows, new.previous_cosine) == (0, None), "it had no earlier file"
    [again] = finish_receipts(make_run(pool, changed[:1], output, bounds, force=True), "encoded")
    assert again.compared_rows == SAMPLE_ROWS and again.previous_cosine == pytest.approx(1, abs=1e-6)
