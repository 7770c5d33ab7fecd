"""A signal that another thread received interrupts every wait of the main thread, and no wait ends
too early."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.waiting import (
    every,
    in_background,
    next_item,
    result_of,
    wait_for_thread,
    wait_in_turns,
)
from tests.signals import interrupted_in_another_thread

pytestmark = pytest.mark.timeout(60)
TEN_MINUTES = 600.0


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    """The event that the waits of a test wait for; it is set after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def held(opened: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=opened.wait)
    thread.start()
    return thread


def test_error_in_a_repeated_call_is_logged_and_does_not_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called_again = threading.Event()

    def call() -> None:
        if caplog.messages:
            called_again.set()
        raise OSError("database is locked")

    with every(0.01, call, "surge-progress"):
        assert called_again.wait(30)
    assert caplog.messages[0] == "surge-progress: OSError: database is locked; it goes on in 0.01 s"


@pytest.mark.parametrize("seconds", [None, TEN_MINUTES])
def test_every_wait_is_interrupted(
    held: threading.Thread, opened: threading.Event, seconds: float | None
) -> None:
    waits: list[Callable[[], object]] = [
        lambda: wait_in_turns(opened.wait, seconds),
        lambda: wait_for_thread(held, seconds),
        lambda: next_item(queue.Queue()),
        lambda: next_item(queue.SimpleQueue()),
    ]
    for wait in waits:
        with interrupted_in_another_thread():
            wait()


def test_wait_ends_with_success_or_timeout() -> None:
    turns: list[float] = []

    def third(turn: float) -> bool:
        turns.append(turn)
        return len(turns) == 3

    assert wait_in_turns(third)
    assert turns == [0.1] * 3
    assert not wait_in_turns(lambda turn: turns.append(turn), 0.0)  # type: ignore[func-returns-value]
    assert turns == [0.1] * 3 + [0.0]
    assert wait_in_turns(lambda turn: True, 0.0)
    items = queue.SimpleQueue[int]()
    threading.Timer(0.3, items.put, [1]).start()
    assert next_item(items) == 1


def test_concurrent_reads_are_interrupted(opened: threading.Event, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.is_remote = True
    with interrupted_in_another_thread():
        list(store.reads_ahead(["a", "b"], lambda *_: opened.wait()))


def test_calls_in_the_background_do_not_wait_for_each_other() -> None:
    together = threading.Barrier(40)
    answers = [in_background(lambda: together.wait(30), "call") for _ in range(40)]
    assert sorted(map(result_of, answers)) == list(range(40))
