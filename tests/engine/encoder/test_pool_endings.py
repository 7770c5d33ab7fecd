"""Calls, arenas and pools that end early: nothing hangs, and no process or slot is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.schedule import PORTIONS
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.support.waiting import in_background
from tests.engine.encoder.conftest import column, encode, filled_slot
from tests.engine.encoder.faulty_pools import faulty_pool, harmless, wait_for_end, with_harm
from tests.signals import interrupted_in_another_thread
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("faulty_workers", "no_leaks")]


def test_workers_start_the_next_superbatch_before_the_end_of_the_current_one(
    tmp_path: Path,
) -> None:
    first = [*harmless(999), f"hang once {tmp_path / 'hung'}"]
    second = harmless(3_000)[1_000:]
    with faulty_pool() as pool, pool.arena(slots=2, max_texts=2_000, max_bytes=1 << 20) as arena:
        slots = [arena.acquire(), arena.acquire()]
        slots[0].append(column(first))
        slots[1].append(column(second))
        calls = [*map(pool.submit, slots)]
        hung = tmp_path / "hung"
        # by one worker, while the other hangs at the end of the first
        while not (hung.exists() and calls[1].encoded):
            assert calls[0].result(0.01) is None
        for pid in pool.worker_pids:
            os.kill(pid, signal.SIGKILL)
        assert calls[0].result(60) is not None
        assert calls[1].result(60) is not None
        assert np.array_equal(slots[1].matrix(0, 2_000), hash_vectors(second, 16))
        assert np.array_equal(slots[0].matrix(0, 1_000), hash_vectors(first, 16))
        for call in calls:
            assert call.metrics.costs.encode_seconds > 0


def test_abandoned_call_lists_the_rows_that_have_vectors(tmp_path: Path) -> None:
    texts = [*harmless(20_000), f"hang once {tmp_path / 'hung'}"]
    with faulty_pool() as pool, filled_slot(pool, texts) as slot:
        call = pool.submit(slot)
        while not (tmp_path / "hung").exists() or not call.encoded:
            assert call.result(0.01) is None
        call.abandon()
        expected = hash_vectors(texts, 16)
        assert call.encoded
        for start, stop in call.encoded:
            assert stop < len(texts)
            assert np.array_equal(slot.matrix(start, stop), expected[start:stop])


@pytest.mark.parametrize("is_abandoned", [True, False])
def test_arena_can_be_closed_while_a_worker_holds_portions_of_it(
    tmp_path: Path, is_abandoned: bool
) -> None:
    seen = tmp_path / "seen"
    gate = tmp_path / "gate"
    texts = [f"wait {gate}", *harmless(20_000)]
    texts[PORTIONS.texts + 1] = f"seen {seen}"  # in the portion that waits behind the first one
    with faulty_pool("cpu", max_respawns=0) as pool:
        pids = pool.worker_pids
        with filled_slot(pool, texts) as slot:
            call = pool.submit(slot)
            while not seen.exists():
                assert call.result(0.01) is None
            if is_abandoned:
                call.abandon()
                assert call.encoded == []
                assert call.metrics.costs.encode_seconds > 0
        gate.touch()
        if not is_abandoned:
            with pytest.raises(EncoderError, match="arena was closed"):
                call.result()
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))
        assert pool.worker_pids == pids
        both = 2 * PORTIONS.texts
        assert call.encoded[-1] == (PORTIONS.texts, both), (
            "the portion that waited is encoded, and no further one"
        )
        assert np.array_equal(slot.matrix(0, both), hash_vectors(texts[:both], 16))


def test_slot_of_a_call_that_failed_with_the_pool_is_free_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    texts = [f"wait {gate}", *["die always"] * 4_000]  # one worker waits, the other one dies
    with faulty_pool(max_respawns=0) as pool, filled_slot(pool, texts) as slot:
        with pytest.raises(EncoderError, match="giving up"):
            pool.submit(slot).result()
        pool.close()  # its thread has ended by now, so nothing gives a slot back later
        slot.release()
        slot.arena.acquire(lambda: True)


def test_closing_ends_a_hung_worker_and_the_waiting_call(tmp_path: Path) -> None:
    pool = faulty_pool()
    texts = with_harm(f"hang once {tmp_path / 'hung'}")
    waiting = in_background(lambda: encode(pool, texts), "waiting")
    until((tmp_path / "hung").exists)
    pool.close()
    with pytest.raises(EncoderError, match="the encoder pool is closed"):
        waiting.result(60)


_PARENT = """
import os, signal, sys, threading
# Ignored signals are inherited from the test runner.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
import pyarrow as pa
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
pool = EncoderPool(EncodingSpec("hash://16"), devices="cpu,cpu", backend="faults:FaultyBackend")
pool.start()
arena = pool.arena(slots=1, max_texts=2000, max_bytes=100000)
slot = arena.acquire()
slot.append(pa.array(["harmless"] * 1999 + [sys.argv[1]], pa.large_string()))
if sys.argv[2] == "fork" and (child := os.fork()) == 0:
    # A child that inherited every descriptor, the workers' lifelines too, and outlives its parent.
    threading.Event().wait()
try:
    print(*pool.worker_pids, *([child] if sys.argv[2] == "fork" else []), flush=True)
    pool.encode(slot)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    pool.close()
"""


@pytest.mark.parametrize(
    ("ending", "fork"), [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGKILL, True)]
)
def test_workers_end_when_the_parent_is_killed_although_a_fork_of_it_may_live_on(
    tmp_path: Path, ending: signal.Signals, fork: bool
) -> None:
    parent = _start_parent(tmp_path, fork=fork)
    children = [parent.pids.pop()] if fork else []
    try:
        os.kill(parent.pid, ending)
        parent.wait(60)
        wait_for_end(parent.pids)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)  # it lives on


def test_interrupt_reaches_the_pool_and_not_the_workers(tmp_path: Path) -> None:
    parent = _start_parent(tmp_path)
    for pid in parent.pids:
        os.kill(pid, signal.SIGINT)
    os.kill(parent.pid, signal.SIGINT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "interrupted\n"
    assert parent.wait(60) == 0
    wait_for_end(parent.pids)


class _Parent(subprocess.Popen):
    pids: list[int]


def _start_parent(tmp_path: Path, *, fork: bool = False) -> _Parent:
    """A process with a pool whose workers encode a text that hangs, and with a fork of itself if
    requested."""
    hung = tmp_path / "hung"
    arguments = [sys.executable, "-c", _PARENT, f"hang once {hung}", "fork" if fork else ""]
    parent = _Parent(
        arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert parent.stdout is not None
    parent.pids = [*map(int, parent.stdout.readline().split())]
    assert len(parent.pids) == 2 + fork
    while not hung.exists():
        assert parent.poll() is None
    return parent


def test_start_of_a_pool_is_interrupted_by_a_signal_to_another_thread() -> None:
    with interrupted_in_another_thread():
        faulty_pool("cpu", "UnreadyBackend")


def test_waiting_for_a_call_or_a_slot_is_interrupted_by_a_signal_to_another_thread(
    tmp_path: Path,
) -> None:
    with faulty_pool("cpu") as pool, filled_slot(pool, [f"wait {tmp_path / 'opened'}"]) as slot:
        with interrupted_in_another_thread():
            pool.encode(slot)
        with interrupted_in_another_thread():
            slot.arena.acquire()
        (tmp_path / "opened").touch()
