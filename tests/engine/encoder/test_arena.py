"""The arena: rows are copied in once and read as views."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.arena import Arena, ArenaClosed, Cancelled
from surge_dagster.engine.support.values import value_parts
from tests.engine.encoder.conftest import column

TEXTS = ["", "one", "zwei Wörter", "東京", "a longer text than the others", "🚀"]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(slots=2, max_texts=10, max_bytes=200, dimension=3, dtype="float32") as arena:
        yield arena


def test_rows_are_unchanged_also_from_slices_and_in_several_steps(arena: Arena) -> None:
    slot = arena.acquire()
    slot.append(column(["left out", *TEXTS, "left out too"]).slice(1, 3))
    slot.append(column([]))
    slot.append(column(TEXTS[3:]))
    assert len(slot) == len(TEXTS)
    assert slot.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert slot.texts(0, len(slot)).to_pylist() == TEXTS
    assert slot.texts(2, 5).to_pylist() == TEXTS[2:5]
    slot.texts(0, len(slot)).validate(full=True)


def test_small_and_large_texts_are_copied_alike() -> None:
    texts = ["short", "x" * 70_000, "", "ö" * 32_768, "y" * 65_537, "end"]
    with Arena(slots=2, max_texts=10, max_bytes=300_000, dimension=3, dtype="float32") as arena:
        # what one slot holds must not show in the other one
        first = arena.acquire()
        second = arena.acquire()
        for slot in (second, first):
            for text in texts:
                rows = column(["left out", text])[1:]
                slot.append(rows, value_parts(rows))
            slot.append(column(["dropped"]))
            slot.truncate(len(texts))
            slot.append(column(["more"]))
        for slot in (first, second):
            assert slot.texts(0, len(slot)).to_pylist() == [*texts, "more"]
            assert slot.text_bytes == sum(len(text.encode()) for text in texts) + 4


def test_views_of_texts_and_vectors_share_the_slots_memory(arena: Arena) -> None:
    slot = arena.acquire()
    slot.append(column(TEXTS))
    buffers = [slot.texts(start, stop).buffers() for start, stop in ((0, 6), (2, 4))]
    assert buffers[0][2].address == buffers[1][2].address
    assert buffers[1][1].address == buffers[0][1].address + 2 * 8
    assert np.shares_memory(slot.matrix(0, 6), slot.matrix(2, 4))
    slot.matrix(0, 6)[3] = 7
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(slot.matrix(2, 4).ravel()), 3)
    assert vectors.to_pylist()[1] == [7, 7, 7]
    assert vectors.values.buffers()[1].address == slot.matrix(2, 4).ctypes.data


def test_rows_that_do_not_fit_or_are_null_are_refused_and_leave_the_slot_unchanged(
    arena: Arena,
) -> None:
    slot = arena.acquire()
    slot.append(column(TEXTS))
    for refused in (column(["x"] * 5), column(["x" * 200]), column(["x", None])):  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"null|do not fit"):
            slot.append(refused)
    assert slot.texts(0, len(slot)).to_pylist() == TEXTS
    assert slot.room == (4, 200 - slot.text_bytes)


def test_tail_moves_to_another_slot(arena: Arena) -> None:
    slot = arena.acquire()
    other = arena.acquire()
    slot.append(column(TEXTS))
    slot.move_tail(4, other)
    assert slot.texts(0, len(slot)).to_pylist() == TEXTS[:4]
    assert other.texts(0, len(other)).to_pylist() == TEXTS[4:]
    slot.append(column(["more"]))
    assert slot.texts(3, 5).to_pylist() == [TEXTS[3], "more"]
    with pytest.raises(ValueError, match="not empty"):
        slot.move_tail(0, other)


def test_slot_is_reused_only_after_release_and_after_every_worker_has_finished_with_it(
    arena: Arena,
) -> None:
    first = arena.acquire()
    second = arena.acquire()
    with pytest.raises(Cancelled):
        arena.acquire(lambda: True)
    first.pin()
    first.release()
    with pytest.raises(Cancelled):
        arena.acquire(lambda: True)
    first.unpin()
    again = arena.acquire()
    assert (again.index, len(again)) == (first.index, 0)
    second.release()
    second.release()
    arena.acquire()
    with pytest.raises(Cancelled):
        arena.acquire(lambda: True)
    with pytest.raises(ValueError, match="released"):
        second.matrix(0, 0)


def test_closing_wakes_waiting_threads_and_leaves_views_readable(arena: Arena) -> None:
    slot = arena.acquire()
    slot.append(column(TEXTS))
    texts = slot.texts(0, len(slot))
    arena.acquire()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            arena.acquire()
        except ArenaClosed as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    arena.close()
    waiting.join(30)
    assert len(outcome) == 1
    assert texts.to_pylist() == TEXTS
    with pytest.raises(ArenaClosed):
        arena.acquire()
