"""Workers die, hang and fail: the pool replaces them, encodes their rows again, and never hangs or
leaks a process."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder import dispatcher, schedule
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeMetrics
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.errors import EncoderError
from tests.engine.encoder.conftest import encode, filled_slot
from tests.engine.encoder.faulty_pools import SPEC, beyond_signals, faulty_pool, with_harm

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("faulty_workers", "no_leaks")]


@pytest.mark.parametrize("harm", ["die", "fail"])
def test_lost_worker_is_replaced_and_no_row_is_lost_or_wrong(tmp_path: Path, harm: str) -> None:
    once = f"{harm} once {tmp_path}"
    texts = with_harm(f"{once}/0", f"{once}/1", f"{once}/2")
    with faulty_pool() as pool:
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))
        assert len(list(tmp_path.iterdir())) == 3
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))


def test_idle_worker_that_is_killed_is_replaced() -> None:
    with faulty_pool() as pool:
        for pid in pool.worker_pids:
            os.kill(pid, signal.SIGKILL)
        texts = with_harm()
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))


@pytest.mark.parametrize(
    "kind", ["in its own code", "stopped by a signal", "while it goes on printing"]
)
def test_hung_worker_is_replaced_and_the_log_shows_its_stacks(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    verbs = {"in its own code": "hang", "while it goes on printing": "chatter"}
    texts = with_harm(f"{verbs[kind]} once {tmp_path / 'hung'}") if kind in verbs else with_harm()
    with faulty_pool(hang_timeout_seconds=2.5, max_respawns=9) as pool:
        if kind == "stopped by a signal":
            os.kill(pool.worker_pids[0], signal.SIGSTOP)
        assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))
    words = r"faults.py\", line \d+ in _harm" if kind in verbs else "it printed nothing"
    assert re.search(rf"(?s)worker \d+ hung.*{words}", caplog.text)


def test_worker_that_no_signal_ends_is_given_up_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = with_harm()
    with faulty_pool(hang_timeout_seconds=2.5, max_respawns=9) as pool:
        stuck, _ = pool.worker_pids
        with beyond_signals(stuck):
            assert np.array_equal(encode(pool, texts), hash_vectors(texts, 16))
            assert len(pool.worker_pids) == 2
            assert stuck not in pool.worker_pids
            assert Path(f"/proc/{stuck}").exists()
    assert f"worker {stuck} on cpu was killed and does not end" in caplog.text


def _submit(pool: EncoderPool, texts: list[str]) -> tuple[EncodeMetrics, np.ndarray]:
    """The metrics of a call in which texts may fail, and the matrix."""
    with filled_slot(pool, texts) as slot:
        metrics = pool.submit(slot).result()
        assert metrics is not None
        return metrics, slot.matrix(0, len(texts)).copy()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("die always", r"worker \d+ on cpu ended: SIGKILL"),
        ("fail always", "DeviceLost: the device was lost"),
        pytest.param("hang always", "showed no progress for", marks=pytest.mark.soak),
        pytest.param("babble", "DeviceLost: ", marks=pytest.mark.soak),
        pytest.param("panic", "Panic: the tokenizer panicked", marks=pytest.mark.soak),
    ],
)
def test_text_that_ends_every_worker_fails_alone_and_is_named(harm: str, reason: str) -> None:
    texts = with_harm(harm)[: 720 if harm == "hang always" else None]
    with faulty_pool(
        hang_timeout_seconds=1.5 if harm == "hang always" else 120, max_respawns=1
    ) as pool:
        metrics, found = _submit(pool, texts)
        [failed] = metrics.failed
        assert failed.row == 700
        assert re.search(reason, failed.reason)
        others = np.arange(len(texts)) != 700
        assert np.array_equal(found[others], hash_vectors(texts, 16)[others])
        assert metrics.costs.replays <= 10
        with pytest.raises(EncoderError, match=f"(?s)1 texts cannot be encoded; row 2: .*{reason}"):
            encode(pool, ["harmless", "as well", harm])
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))


def test_superbatch_that_ends_too_many_workers_fails_and_the_pool_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_LOSSES", 2)
    with faulty_pool() as pool:
        with pytest.raises(
            EncoderError, match=r"(?s)SIGKILL.*2 workers in one SuperBatch.*the device is on fire"
        ):
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
    with faulty_pool(backend="OnceBackend", max_respawns=2) as pool:
        with pytest.raises(
            EncoderError, match=r"(?s)SIGKILL.*3 times in a row; giving up.*the device is on fire"
        ):
            encode(pool, with_harm("die always"))
        with pytest.raises(EncoderError, match="giving up"):
            encode(pool, ["harmless"])


@pytest.mark.usefixtures("starts")
def test_seat_whose_device_is_busy_for_a_while_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "start-1").rename(tmp_path / "start-1-refused")
    (tmp_path / "start-2").touch()
    with faulty_pool("cpu", "OnceBackend") as pool:
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        assert np.array_equal(encode(pool, ["harmless"]), hash_vectors(["harmless"], 16))
    assert list(tmp_path.iterdir()) == []


def test_error_inside_the_pool_ends_every_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("broken")

    with EncoderPool(SPEC, devices="cpu") as pool:
        monkeypatch.setattr(schedule.EncodeCall, "add", fail)
        for _ in range(2):
            with pytest.raises(EncoderError, match="the encoder pool failed inside: KeyError"):
                encode(pool, ["harmless"])
    caplog.clear()  # the logged traceback holds the arena


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("RefusingBackend", "DeviceLost: no such device"),
        ("CrashingBackend", r"(?s)ended: SIGSEGV.*faults.py\", line \d+ in __init__"),
    ],
)
def test_worker_that_cannot_start_reports_why_and_leaves_nothing(backend: str, reason: str) -> None:
    with pytest.raises(EncoderError, match=reason):
        faulty_pool(backend=backend, max_respawns=0)


def test_worker_that_is_not_ready_in_time_ends_the_start_and_shows_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS_LOADING", str(tmp_path / "loading"))

    def end_the_time_once_it_loads() -> None:
        while not (tmp_path / "loading").exists():
            time.sleep(0.01)
        monkeypatch.setattr(dispatcher, "_START_TIMEOUT_SECONDS", 1)

    threading.Thread(target=end_the_time_once_it_loads, daemon=True).start()
    waited = r"worker \d+ on cpu was not ready after 1 s; .* run again"
    with pytest.raises(EncoderError, match=rf"(?s)^{waited}\n.*faults.py\", line \d+ in __init__"):
        faulty_pool("cpu", "UnreadyBackend")


def test_threads_that_share_a_pool_lose_nothing_while_its_workers_die(tmp_path: Path) -> None:
    right: list[str] = []
    with faulty_pool(max_respawns=20) as pool:

        def use(name: str) -> None:
            for call in range(3):
                texts = [f"{name} {call} row {row}" for row in range(3_000)]
                texts[1_500] = f"die once {tmp_path / f'{name}-{call}'}"
                if np.array_equal(encode(pool, texts), hash_vectors(texts, 16)):
                    right.append(name)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(use, "ab"))
        assert len(list(tmp_path.iterdir())) == 6
    assert sorted(right) == ["a"] * 3 + ["b"] * 3
