"""The ledger of resident bytes never passes its limit, and every wait ends."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from surge_dagster.engine.errors import Cancelled
from surge_dagster.engine.support.ledger import Ledger


def test_ledger_knows_held_bytes_and_their_peak_and_refuses_what_cannot_be() -> None:
    ledger = Ledger(100)
    ledger.reserve(60)
    assert ledger.try_reserve(40)
    assert not ledger.try_reserve(1), "it does not wait"
    ledger.release(70)
    assert (ledger.held, ledger.peak) == (30, 100)
    with pytest.raises(ValueError, match="cannot reserve 101 bytes under a limit of 100"):
        ledger.reserve(101)
    with pytest.raises(ValueError, match="cannot release 31 bytes: only 30 are held"):
        ledger.release(31)


def test_waiting_thread_continues_when_bytes_are_released() -> None:
    ledger = Ledger(100)
    ledger.reserve(100)
    through = threading.Event()
    checked = threading.Event()

    def wait_for_room() -> None:
        ledger.reserve(50, lambda: checked.set() or False)
        through.set()

    threading.Thread(target=wait_for_room).start()
    assert checked.wait(10)
    assert not through.is_set()
    ledger.release(50)
    assert through.wait(10)


def test_cancelled_reservation_holds_nothing() -> None:
    ledger = Ledger(100)
    ledger.reserve(100)
    with pytest.raises(Cancelled):
        ledger.reserve(1, lambda: True)
    assert ledger.held == 100


def test_many_threads_together_never_pass_the_limit() -> None:
    ledger = Ledger(100)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            size = chance.randint(1, 60)
            ledger.reserve(size)
            assert ledger.held <= 100
            ledger.release(size)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert ledger.held == 0
    assert ledger.peak <= 100
