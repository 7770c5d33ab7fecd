"""Workers die, hang and fail: the pool replaces them, encodes their rows again, and never hangs or leaks a process."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder import dispatcher, schedule, worker_process
from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import LARGEST_CHUNK_TEXTS
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.encoder.conftest import column, encode, open_descriptors
from tests.engine.encoder.small_device import expected_vectors
from tests.signals import interrupted_in_another_thread

SPEC = EncodingSpec("hash://16")

pytestmark = pytest.mark.usefixtures("faulty_workers", "no_leaks")


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Checks after each test that no process and no descriptor outlives its pool."""
    gc.collect()
    before = open_descriptors()
    yield
    assert _children() == []
    gc.collect()
    assert open_descriptors() - before == set()


def _faulty_pool(**options: Any) -> EncoderPool:
    return EncoderPool(SPEC, devices="cpu,cpu", backend="faults:FaultyBackend", **options)


def _with_harm(*harm: str) -> list[str]:
    texts = [f"harmless {row}" for row in range(4_000)]
    for place, text in enumerate(harm):
        texts[700 * (place + 1)] = text
    return texts


def test_killed_worker_is_replaced_and_no_row_is_lost_or_wrong(tmp_path: Path) -> None:
    texts = _with_harm(*(f"die once {tmp_path / str(n)}" for n in range(3)))
    with _faulty_pool() as pool:
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))
        assert pool.replays >= 1
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))


def test_idle_worker_that_is_killed_is_replaced() -> None:
    with _faulty_pool() as pool:
        for pid in pool.worker_pids:
            os.kill(pid, signal.SIGKILL)
        texts = _with_harm()
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))


@pytest.mark.parametrize("kind", ["in its own code", "stopped by a signal", "while it goes on printing"])
def test_hung_worker_is_replaced_and_the_log_shows_its_stacks(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    verbs = {"in its own code": "hang", "while it goes on printing": "chatter"}
    texts = _with_harm(f"{verbs[kind]} once {tmp_path / 'hung'}") if kind in verbs else _with_harm()
    with _faulty_pool(hang_timeout_seconds=2.5, max_respawns=9) as pool:
        if kind == "stopped by a signal":
            os.kill(pool.worker_pids[0], signal.SIGSTOP)
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))
        assert pool.replays >= 1
    words = r"faults.py\", line \d+ in _harm" if kind in verbs else "it printed nothing"
    assert re.search(rf"(?s)worker \d+ hung.*{words}", caplog.text)


@contextlib.contextmanager
def _beyond_signals(*pids: int) -> Iterator[None]:
    """Stops processes that no signal of the pool ends, like processes that hang in the kernel."""
    send = subprocess.Popen.send_signal

    def withhold(process: subprocess.Popen, number: int) -> None:
        if process.pid not in pids:
            send(process, number)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "send_signal", withhold)
            patch.setattr(worker_process, "_KILLED_SECONDS", 0.2)
            # As if a child process still printed.
            patch.setattr(worker_process.WorkerProcess, "_has_output", lambda *_: True)
            yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        _wait_for_end(list(pids))


def test_worker_that_no_signal_ends_is_given_up_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    texts = _with_harm()
    with _faulty_pool(hang_timeout_seconds=2.5, max_respawns=9) as pool:
        stuck, _ = pool.worker_pids
        with _beyond_signals(stuck):
            assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))
            assert len(pool.worker_pids) == 2
            assert stuck not in pool.worker_pids
            assert Path(f"/proc/{stuck}").exists()
    assert f"worker {stuck} on cpu was killed and does not end" in caplog.text


def test_pool_whose_workers_no_signal_ends_can_be_closed(tmp_path: Path) -> None:
    texts = [f"hang once {tmp_path / 'hung'}", "harmless"]
    with _faulty_pool() as pool, pool.arena(slots=1, max_texts=2, max_bytes=1_000) as arena:
        slot = arena.acquire()
        slot.append(column(texts))
        call = pool.submit(slot)
        while not (tmp_path / "hung").exists():
            assert call.result(0.01) is None
        with _beyond_signals(*pool.worker_pids):
            call.abandon()
            pool.close()
            assert pool.worker_pids == []
            slot.release()
            arena.acquire(lambda: True)  # no worker writes into it any more


def test_rows_of_a_worker_with_an_exception_are_encoded_by_a_new_worker(tmp_path: Path) -> None:
    texts = _with_harm(f"fail once {tmp_path / 'failed'}")
    with _faulty_pool() as pool:
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))


def _submit(pool: EncoderPool, texts: list[str], borders: list[int] | None = None) -> tuple[EncodeMetrics, np.ndarray]:
    """The metrics of a call in which texts may fail, and the matrix."""
    with pool.arena(slots=1, max_texts=len(texts), max_bytes=sum(len(t.encode()) for t in texts)) as arena:
        slot = arena.acquire()
        slot.append(column(texts))
        figures = pool.submit(slot, None if borders is None else np.array(borders)).result()
        assert figures is not None
        return figures, slot.matrix(0, len(texts)).copy()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("die always", r"worker \d+ on cpu ended: SIGKILL"),
        ("fail always", "DeviceLost: the device was lost"),
        ("hang always", "showed no progress for"),
        pytest.param("babble", "DeviceLost: ", marks=pytest.mark.soak),
        pytest.param("panic", "Panic: the tokenizer panicked", marks=pytest.mark.soak),
    ],
)
def test_text_that_ends_every_worker_fails_alone_and_is_named(harm: str, reason: str) -> None:
    texts = _with_harm(harm)[: 720 if harm == "hang always" else None]
    with _faulty_pool(hang_timeout_seconds=1.5 if harm == "hang always" else 120, max_respawns=1) as pool:
        figures, found = _submit(pool, texts)
        assert [failed.row for failed in figures.failed] == [700]
        assert re.search(reason, figures.failed[0].reason)
        others = np.arange(len(texts)) != 700
        assert np.array_equal(found[others], hash_vectors(texts, 16)[others])
        assert figures.replays <= 10
        with pytest.raises(EncoderError, match=f"(?s)1 texts cannot be encoded; row 2: .*{reason}"):
            encode(pool, ["harmless", "as well", harm])
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))


def test_group_full_of_failing_texts_costs_no_more_than_one_failing_text() -> None:
    texts = [f"harmless {row}" for row in range(3_000)]
    texts[1_000:1_500] = ["die always"] * 500
    texts[2_000] = "die always"
    with _faulty_pool() as pool:
        figures, found = _submit(pool, texts, borders=[0, 1_000, 1_500, 2_000, 2_001])
        assert sorted(failed.row // 500 for failed in figures.failed) == [2, 4]
        others = np.r_[0:1_000, 1_500:2_000, 2_001:3_000]
        assert np.array_equal(found[others], hash_vectors(texts, 16)[others])
        assert figures.replays <= 20


def test_workers_that_run_out_of_memory_continue_with_a_smaller_budget() -> None:
    rng = np.random.default_rng(11)
    texts = [" ".join(rng.choice(["one", "two", "three"], int(size))) for size in rng.integers(0, 60, 3_000)]
    with EncoderPool(EncodingSpec("hash://4"), devices="cpu,cpu", backend="small_device:PooledBackend") as pool:
        pids = pool.worker_pids
        assert np.array_equal(encode(pool, texts), expected_vectors(texts))
        assert (pool.worker_pids, pool.replays) == (pids, 0), "no worker had to end for it"
        os.kill(pids[0], signal.SIGKILL)
        assert np.array_equal(encode(pool, texts), expected_vectors(texts))


def test_superbatch_that_ends_too_many_workers_fails_and_the_pool_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_LOSSES", 2)
    with _faulty_pool() as pool:
        with pytest.raises(EncoderError, match=r"(?s)SIGKILL.*2 workers in one SuperBatch.*the device is on fire"):
            encode(pool, ["die always"] * 2_000)
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts for workers of the `OnceBackend`."""
    for place in range(2):
        (tmp_path / f"start-{place}").touch()
    monkeypatch.setenv("FAULTS_STARTS", str(tmp_path))


@pytest.mark.usefixtures("starts")
def test_worker_that_cannot_be_replaced_ends_the_pool_with_its_last_output() -> None:
    with EncoderPool(SPEC, devices="cpu,cpu", backend="faults:OnceBackend", max_respawns=2) as pool:
        with pytest.raises(EncoderError, match=r"(?s)SIGKILL.*3 times in a row; giving up.*the device is on fire"):
            encode(pool, _with_harm("die always"))
        with pytest.raises(EncoderError, match="giving up"):
            encode(pool, ["harmless"])


@pytest.mark.usefixtures("starts")
def test_seat_whose_device_is_busy_for_a_while_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "start-1").rename(tmp_path / "start-1-refused")
    (tmp_path / "start-2").touch()
    with EncoderPool(SPEC, devices="cpu", backend="faults:OnceBackend") as pool:
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("starts")
def test_every_waiting_thread_gets_the_error() -> None:
    with EncoderPool(SPEC, devices="cpu,cpu", backend="faults:OnceBackend", max_respawns=0) as pool:
        outcomes: list[type[BaseException]] = []

        def try_it(harm: str) -> None:
            try:
                encode(pool, _with_harm(harm))
            except EncoderError as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=try_it, args=("die always",)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert outcomes == [EncoderError] * 3


def test_workers_start_the_next_superbatch_before_the_end_of_the_current_one(tmp_path: Path) -> None:
    first = [f"harmless {row}" for row in range(999)] + [f"hang once {tmp_path / 'hung'}"]
    second = [f"next {row}" for row in range(2_000)]
    with _faulty_pool() as pool, pool.arena(slots=2, max_texts=2_000, max_bytes=1 << 20) as arena:
        slots = [arena.acquire(), arena.acquire()]
        slots[0].append(column(first))
        slots[1].append(column(second))
        calls = [pool.submit(slot) for slot in slots]
        while not calls[1].encoded:  # by one worker, while the other one hangs at the end of the first
            assert calls[0].result(0.01) is None
        for pid in pool.worker_pids:
            os.kill(pid, signal.SIGKILL)
        assert calls[0].result(60) is not None
        assert calls[1].result(60) is not None
        assert np.array_equal(slots[1].matrix(0, 2_000), hash_vectors(second, 16))
        assert np.array_equal(slots[0].matrix(0, 1_000), hash_vectors(first, 16))
        assert all(call.metrics.encode_seconds > 0 for call in calls)


def test_abandoned_call_lists_the_rows_that_have_vectors(tmp_path: Path) -> None:
    texts = [f"harmless {row}" for row in range(20_000)] + [f"hang once {tmp_path / 'hung'}"]
    with _faulty_pool() as pool, pool.arena(slots=1, max_texts=len(texts), max_bytes=1 << 20) as arena:
        slot = arena.acquire()
        slot.append(column(texts))
        call = pool.submit(slot)
        while not (tmp_path / "hung").exists() or not call.encoded:
            assert call.result(0.01) is None
        call.abandon()
        expected = hash_vectors(texts, 16)
        assert call.encoded
        assert all(stop < len(texts) for _, stop in call.encoded)
        for start, stop in call.encoded:
            assert np.array_equal(slot.matrix(start, stop), expected[start:stop])


def test_arena_can_be_closed_while_workers_hold_chunks_of_an_abandoned_call(tmp_path: Path) -> None:
    seen, gate = tmp_path / "seen", tmp_path / "gate"
    texts = [f"wait {gate}", *(f"harmless {row}" for row in range(20_000))]
    texts[LARGEST_CHUNK_TEXTS + 1] = f"seen {seen}"  # in the chunk that waits behind the first one
    with EncoderPool(SPEC, devices="cpu", backend="faults:FaultyBackend", max_respawns=0) as pool:
        pids = pool.worker_pids
        with pool.arena(slots=1, max_texts=len(texts), max_bytes=1 << 20) as arena:
            slot = arena.acquire()
            slot.append(column(texts))
            call = pool.submit(slot)
            while not seen.exists():
                assert call.result(0.01) is None
            call.abandon()
            assert call.encoded == []
            assert call.metrics.encode_seconds > 0
        gate.touch()
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))
        assert (pool.worker_pids, pool.replays) == (pids, 0)
        assert call.encoded[-1] == (LARGEST_CHUNK_TEXTS, 2 * LARGEST_CHUNK_TEXTS), "no further chunk is encoded"


def test_arena_can_be_closed_while_a_worker_holds_a_chunk_of_it(tmp_path: Path) -> None:
    seen, gate = tmp_path / "seen", tmp_path / "gate"
    texts = [f"wait {gate}", *(f"harmless {row}" for row in range(20_000))]
    texts[LARGEST_CHUNK_TEXTS + 1] = f"seen {seen}"
    with EncoderPool(SPEC, devices="cpu", backend="faults:FaultyBackend", max_respawns=0) as pool:
        arena = pool.arena(slots=1, max_texts=len(texts), max_bytes=1 << 20)
        slot = arena.acquire()
        slot.append(column(texts))
        call = pool.submit(slot)
        while not seen.exists():
            assert call.result(0.01) is None
        arena.close()
        gate.touch()
        with pytest.raises(EncoderError, match="arena was closed"):
            call.result()
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))
        both = 2 * LARGEST_CHUNK_TEXTS
        assert call.encoded[-1] == (LARGEST_CHUNK_TEXTS, both), "the chunk that waited was encoded, too"
        assert np.array_equal(slot.matrix(0, both), hash_vectors(texts[:both], 16))
        assert pool.replays == 0


def test_slot_of_a_call_that_failed_with_the_pool_is_free_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    texts = [f"wait {gate}", *["die always"] * 4_000]  # one worker waits, the other one dies
    with (
        _faulty_pool(max_respawns=0) as pool,
        pool.arena(slots=1, max_texts=len(texts), max_bytes=1 << 20) as arena,
    ):
        slot = arena.acquire()
        slot.append(column(texts))
        with pytest.raises(EncoderError, match="giving up"):
            pool.submit(slot).result()
        pool.close()  # its thread has ended by now, so nothing gives a slot back later
        slot.release()
        arena.acquire(lambda: True)


def test_error_inside_the_pool_ends_every_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("broken")

    with EncoderPool(SPEC, devices="cpu") as pool:
        monkeypatch.setattr(schedule.Schedule, "measure", fail)
        for _ in range(2):
            with pytest.raises(EncoderError, match="the encoder pool failed inside: KeyError"):
                encode(pool, ["harmless"])
    caplog.clear()  # the logged traceback holds the arena


def test_gpu_driver_that_never_answers_does_not_stop_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    class Monitor:
        def __init__(self, devices: list[str]) -> None:
            threading.Event().wait()

    monkeypatch.setattr(dispatcher, "GpuMonitor", Monitor)
    with EncoderPool(SPEC, devices="cpu") as pool:
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))


def test_worker_that_cannot_start_reports_why_and_leaves_nothing() -> None:
    with pytest.raises(EncoderError, match="DeviceLost: no such device"):
        EncoderPool(SPEC, devices="cpu,cpu", backend="faults:RefusingBackend")


def test_worker_that_is_not_ready_in_time_ends_the_start_and_shows_its_stacks() -> None:
    # Enough time for the interpreter to start on a busy machine: before that it cannot print its stacks.
    waited = r"worker \d+ on cpu was not ready after 4 s; .* run again"
    with pytest.raises(EncoderError, match=rf"(?s)^{waited}\n.*faults.py\", line \d+ in __init__"):
        EncoderPool(SPEC, devices="cpu", backend="faults:UnreadyBackend", start_timeout_seconds=4)


def test_crashed_worker_shows_its_stacks() -> None:
    with pytest.raises(EncoderError, match=r"(?s)ended: SIGSEGV.*faults.py\", line \d+ in __init__"):
        EncoderPool(SPEC, devices="cpu", backend="faults:CrashingBackend", max_respawns=0)


def test_worker_cannot_import_the_telemetry_of_openvino() -> None:
    with pytest.raises(EncoderError, match="openvino_telemetry"):
        EncoderPool(SPEC, devices="cpu", backend="faults:ReportingBackend")


def test_closing_ends_a_hung_worker_and_the_waiting_call(tmp_path: Path) -> None:
    pool = _faulty_pool()
    outcome: list[str] = []

    def try_it() -> None:
        try:
            encode(pool, _with_harm(f"hang once {tmp_path / 'hung'}"))
        except EncoderError as error:
            outcome.append(str(error))

    waiting = threading.Thread(target=try_it)
    waiting.start()
    while not (tmp_path / "hung").exists():
        waiting.join(0.01)
    pool.close()
    waiting.join(60)
    assert outcome == ["the encoder pool is closed"]


def test_seeded_kills_over_many_calls_lose_nothing() -> None:
    rng = np.random.default_rng(11)
    with _faulty_pool(max_respawns=20) as pool:
        for call in range(10):
            texts = [f"call {call} row {row}" for row in range(3_000)]
            timer = threading.Timer(float(rng.uniform(0, 0.03)), _kill, [pool, int(rng.integers(2))])
            timer.start()
            found = encode(pool, texts)
            timer.join()
            assert np.array_equal(found, hash_vectors(texts, 16))
        assert pool.replays >= 1


def test_threads_that_share_a_pool_lose_nothing_while_its_workers_die(tmp_path: Path) -> None:
    right: list[str] = []
    with _faulty_pool(max_respawns=20) as pool:

        def use(name: str) -> None:
            for call in range(3):
                texts = [f"{name} {call} row {row}" for row in range(3_000)]
                texts[1_500] = f"die once {tmp_path / f'{name}-{call}'}"
                if np.array_equal(encode(pool, texts), hash_vectors(texts, 16)):
                    right.append(name)

        threads = [threading.Thread(target=use, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.replays >= 6
    assert sorted(right) == ["a"] * 3 + ["b"] * 3


_PARENT = """
import os, signal, sys, threading
# Ignored signals are inherited from the test runner.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
import pyarrow as pa
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import LARGEST_CHUNK_TEXTS
from surge_dagster.engine.model.spec import EncodingSpec
pool = EncoderPool(EncodingSpec("hash://16"), devices="cpu,cpu", backend="faults:FaultyBackend")
arena = pool.arena(slots=1, max_texts=2000, max_bytes=100000)
slot = arena.acquire()
slot.append(pa.array(["harmless"] * 1999 + [sys.argv[1]], pa.large_string()))
if sys.argv[2] == "fork" and (child := os.fork()) == 0:
    # A child that inherited every descriptor, the workers' lifelines among them, and outlives its parent.
    threading.Event().wait()
try:
    print(*pool.worker_pids, *([child] if sys.argv[2] == "fork" else []), flush=True)
    pool.encode(slot)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    pool.close()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_when_the_parent_is_killed(tmp_path: Path, ending: signal.Signals) -> None:
    parent = _start_parent(tmp_path)
    os.kill(parent.pid, ending)
    parent.wait(60)
    _wait_for_end(parent.pids)


def test_workers_end_when_the_parent_is_killed_although_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    parent = _start_parent(tmp_path, fork=True)
    child = parent.pids.pop()
    try:
        parent.kill()
        parent.wait(60)
        _wait_for_end(parent.pids)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_interrupt_reaches_the_pool_and_not_the_workers(tmp_path: Path) -> None:
    parent = _start_parent(tmp_path)
    for pid in parent.pids:
        os.kill(pid, signal.SIGINT)
    os.kill(parent.pid, signal.SIGINT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "interrupted\n"
    assert parent.wait(60) == 0
    _wait_for_end(parent.pids)


class _Parent(subprocess.Popen):
    pids: list[int]


def _start_parent(tmp_path: Path, *, fork: bool = False) -> _Parent:
    """A process with a pool whose workers encode a text that hangs, and with a fork of itself if requested."""
    hung = tmp_path / "hung"
    arguments = [sys.executable, "-c", _PARENT, f"hang once {hung}", "fork" if fork else ""]
    parent = _Parent(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert parent.stdout is not None
    parent.pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(parent.pids) == 2 + fork
    while not hung.exists():
        assert parent.poll() is None
    return parent


def _wait_for_end(pids: list[int]) -> None:
    """Returns when all processes have ended; fails when one of them outlives half a minute."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor):
            ended = select.select([descriptor], [], [], 30)[0]
        assert ended, f"worker {pid} outlived its parent"


def _kill(pool: EncoderPool, seat: int) -> None:
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(pool.worker_pids[seat], signal.SIGKILL)


def _children() -> list[int]:
    """Worker processes of this process that serve a faulty backend's pool: all but those of shared fixtures."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                environment = entry.joinpath("environ").read_bytes()
            except (OSError, ValueError):
                continue
            if parent == os.getpid() and str(Path(__file__).parent).encode() in environment:
                found.append(int(entry.name))
    return found


def test_start_of_a_pool_is_interrupted_by_a_signal_to_another_thread() -> None:
    with interrupted_in_another_thread():
        EncoderPool(SPEC, devices="cpu", backend="faults:UnreadyBackend")


def test_waiting_for_a_call_or_a_slot_is_interrupted_by_a_signal_to_another_thread(tmp_path: Path) -> None:
    with (
        EncoderPool(SPEC, devices="cpu", backend="faults:FaultyBackend") as pool,
        pool.arena(slots=1, max_texts=1, max_bytes=1_000) as arena,
    ):
        slot = arena.acquire()
        slot.append(column([f"wait {tmp_path / 'opened'}"]))
        with interrupted_in_another_thread():
            pool.encode(slot)
        with interrupted_in_another_thread():
            arena.acquire()
        (tmp_path / "opened").touch()
