"""How a run ends after worker failures, stops and interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from tests.engine.runs import (
    completed,
    failures,
    finish,
    in_memory,
    make_run,
    wait_for_publishing_threads,
)
from tests.signals import interrupted_in_another_thread
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    assert_embedded,
    numbered_rows,
    published_files,
)

pytestmark = pytest.mark.processes

SPEC = EncodingSpec(f"hash://{DIMENSION}")
LARGE = Thresholds(b_min=100_000, b_max=100_000)


@pytest.fixture
def faulty_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncoderPool]:
    """A pool of two workers in which texts do harm; see `encoder/faults.py`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "encoder"))
    with EncoderPool(
        SPEC, devices="cpu,cpu", backend="faults:FaultyBackend", max_respawns=20
    ) as pool:
        pool.start()
        yield pool


def _with(rows: Rows, row: int, text: str) -> Rows:
    return [*rows[:row], (rows[row][0], text), *rows[row + 1 :]]


@pytest.mark.parametrize("harm", ["die always", "fail always"])
def test_text_that_kills_workers_fails_only_its_partition(
    faulty_pool: EncoderPool, tmp_path: Path, harm: str
) -> None:
    catalog: dict[str, Rows] = {f"p{n}": numbered_rows(f"p{n}", 700) for n in range(6)}
    catalog["empty"] = []
    catalog["p3"] = _with(catalog["p3"], 400, harm)
    run = make_run(faulty_pool, in_memory(catalog), tmp_path, LARGE)
    [failure] = failures(finish(run))
    assert failure.key == "p3"
    assert not failure.transient
    assert "partition 'p3', row 400: its text ends every worker that encodes it (" in failure.reason
    assert published_files(tmp_path, run.space.name) == {
        f"{key}.parquet" for key in catalog.keys() - {"p3"}
    }
    for key in catalog.keys() - {"p3"}:
        assert_embedded(tmp_path, run.space.name, key, catalog[key])
    assert run.report.superbatches == 1
    assert run.report.costs.replays >= 3


def test_text_that_kills_workers_fails_its_whole_split_partition(
    faulty_pool: EncoderPool, tmp_path: Path
) -> None:
    catalog = {
        "split": _with(numbered_rows("split", 900), 450, "die always"),
        "p": numbered_rows("p", 90),
    }
    run = make_run(faulty_pool, in_memory(catalog), tmp_path, Thresholds(b_min=100, b_max=200))
    [failure] = failures(finish(run))
    assert "partition 'split', row 450: its text ends every worker" in failure.reason
    assert published_files(tmp_path, run.space.name) == {"p.parquet"}


def _kill_now_and_then(
    pool: EncoderPool, rng: np.random.Generator, kills: int, over: threading.Event
) -> int:
    """Kill one worker after another at random times; returns how many were killed."""
    for done in range(kills):
        if over.wait(float(rng.uniform(0.05, 0.4))):
            return done
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pool.worker_pids[int(rng.integers(2))], signal.SIGKILL)
    return kills


@pytest.mark.parametrize(
    "kills", [10, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_workers_killed_during_a_run_lose_and_damage_no_row(tmp_path: Path, kills: int) -> None:
    catalog = {f"p{n}": numbered_rows(f"p{n}", 200 + 37 * (n % 11)) for n in range(40)}
    rng = np.random.default_rng(5)
    killed = rounds = 0
    with EncoderPool(SPEC, devices="cpu,cpu", max_respawns=1_000) as pool:
        while killed < kills:
            over = threading.Event()
            done: list[int] = []
            killer = threading.Thread(
                target=lambda left, over, done: done.append(
                    _kill_now_and_then(pool, rng, left, over)
                ),
                args=(kills - killed, over, done),
            )
            killer.start()
            run = make_run(
                pool, in_memory(catalog), tmp_path / str(rounds), Thresholds(b_min=300, b_max=900)
            )
            events = finish(run)
            over.set()
            killer.join()
            assert failures(events) == []
            for key, rows in catalog.items():
                assert_embedded(tmp_path / str(rounds), run.space.name, key, rows)
            killed += done[0]
            rounds += 1
    assert killed == kills


def test_stopped_run_publishes_what_is_encoded_of_a_superbatch(
    faulty_pool: EncoderPool, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    catalog: dict[str, Rows] = {f"p{n}": numbered_rows(f"p{n}", 4_000) for n in range(4)}
    catalog["p3"] = _with(catalog["p3"], 3_999, f"hang once {hung}")
    run = make_run(faulty_pool, in_memory(catalog), tmp_path / "out", LARGE, grace_seconds=4.0)
    stopped = threading.Event()

    def stop_when_it_hangs() -> None:
        assert faulty_pool._dispatcher is not None
        calls = faulty_pool._dispatcher._schedule.calls
        while not (
            hung.exists() and calls and calls[0].finished_rows >= 8_000
        ) and not stopped.wait(0.01):
            pass
        run.stop()

    stopper = threading.Thread(target=stop_when_it_hangs)
    stopper.start()
    try:
        assert list(run.events())
    finally:
        stopped.set()
        stopper.join()
    files = published_files(tmp_path / "out", run.space.name)
    assert {"p0.parquet", "p1.parquet"} <= files
    assert "p3.parquet" not in files
    assert run.report.texts_encoded == 4_000 * len(files) == 4_000 * run.report.partitions_written
    again = completed(make_run(faulty_pool, in_memory(catalog), tmp_path / "out", LARGE))
    assert again.report.texts_encoded == 4_000 * (4 - len(files))
    for key, rows in catalog.items():
        assert_embedded(tmp_path / "out", run.space.name, key, rows)


class StuckStore(LocalStore):
    """A disk that blocks every file but the first until `go_on` is set."""

    def __init__(self, root: Path, go_on: threading.Event) -> None:
        super().__init__(root)
        self.go_on = go_on
        self.stuck = threading.Event()

    def create(self, name: str) -> LocalUpload:
        upload = StuckUpload(self.root, name)
        upload.store = self
        return upload


class StuckUpload(LocalUpload):
    store: StuckStore

    def flush(self) -> None:
        if self._name.endswith(".parquet") and not self._name.endswith("/p0.parquet"):
            self.store.stuck.set()
            self.store.go_on.wait()
        super().flush()


def test_stopped_run_waits_for_a_hanging_store_only_for_its_grace_time(
    hash_pool: EncoderPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = {f"p{n}": numbered_rows(f"p{n}", 60) for n in range(6)}
    go_on = threading.Event()
    store = StuckStore(tmp_path, go_on)
    run = make_run(hash_pool, in_memory(catalog), store, grace_seconds=0.5)
    events = run.events()
    try:
        assert next(events)
        assert store.stuck.wait(60)
        events.close()
        assert "could be published within the grace time" in caplog.text
        assert published_files(tmp_path, run.space.name) >= {"p0.parquet"}
    finally:
        go_on.set()


def test_second_interrupt_ends_the_wait_and_every_thread(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    go_on = threading.Event()
    store = StuckStore(tmp_path, go_on)
    catalog = {f"p{n}": numbered_rows(f"p{n}", 60) for n in range(6)}
    run = make_run(
        hash_pool, in_memory(catalog), store, Thresholds(b_min=60, b_max=60), grace_seconds=3600
    )
    events = run.events()
    try:
        assert next(events)
        assert store.stuck.wait(60)
        with interrupted_in_another_thread():
            events.close()
    finally:
        go_on.set()
    wait_for_publishing_threads()


STUCK = """
import signal, sys, threading
from pathlib import Path
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.pool import EncoderPool
from tests.engine.runs import in_memory, make_run
from tests.engine.run.test_run_endings import SPEC, StuckStore
from tests.small_catalogs import numbered_rows
signal.signal(signal.SIGINT, signal.default_int_handler)
store = StuckStore(Path(sys.argv[1]), threading.Event())
catalog = {f"p{n}": numbered_rows(f"p{n}", 60) for n in range(6)}
try:
    with EncoderPool(SPEC) as pool:
        for event in make_run(pool, in_memory(catalog), store, grace_seconds=0.5).events():
            assert store.stuck.wait(60)
            print("stuck", flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_stopped_process_does_not_wait_for_threads_blocked_by_the_disk(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "stuck\n"
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 130
        finally:
            running.kill()
