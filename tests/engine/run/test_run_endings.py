"""How a run ends after worker failures, stops and interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.engine.support.waiting import in_background
from tests.engine.runs import (
    Output,
    failures,
    finish,
    in_memory,
    wait_for_publishing_threads,
)
from tests.signals import interrupted_in_another_thread
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    numbered_catalog,
    numbered_rows,
)
from tests.waiting import until

pytestmark = pytest.mark.processes

SPEC = EncodingSpec(f"hash://{DIMENSION}")
LARGE = Thresholds(b_min=100_000, b_max=100_000)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Output]:
    """An output of a pool of two workers in which texts do harm; see `encoder/faults.py`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "encoder"))
    with EncoderPool(
        SPEC, devices="cpu,cpu", backend="faults:FaultyBackend", max_respawns=20
    ) as pool:
        pool.start()
        yield Output(pool, tmp_path / "out")


def _with(rows: Rows, row: int, text: str) -> Rows:
    return [*rows[:row], (rows[row][0], text), *rows[row + 1 :]]


@pytest.mark.parametrize("harm", ["die always", "fail always"])
def test_text_that_kills_workers_fails_only_its_partition(faulty: Output, harm: str) -> None:
    catalog: dict[str, Rows] = numbered_catalog([700] * 6)
    catalog["empty"] = []
    catalog["p3"] = _with(catalog["p3"], 400, harm)
    run = faulty.run(in_memory(catalog), LARGE)
    [failure] = failures(finish(run))
    assert failure.key == "p3"
    assert not failure.transient
    assert "partition 'p3', row 400: its text ends every worker that encodes it (" in failure.reason
    del catalog["p3"]
    assert faulty.keys() == catalog.keys()
    faulty.check_all(catalog)
    assert run.report.superbatches == 1
    assert run.report.costs.replays >= 3


def test_text_that_kills_workers_fails_its_whole_split_partition(faulty: Output) -> None:
    catalog = {
        "split": _with(numbered_rows("split", 900), 450, "die always"),
        "p": numbered_rows("p", 90),
    }
    failure = faulty.failure(in_memory(catalog), Thresholds(b_min=100, b_max=200))
    assert "partition 'split', row 450: its text ends every worker" in failure.reason
    assert faulty.keys() == {"p"}


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
    catalog = numbered_catalog([*range(200, 600, 37)] * 4)
    rng = np.random.default_rng(5)
    killed = rounds = 0
    with EncoderPool(SPEC, devices="cpu,cpu", max_respawns=1_000) as pool:
        while killed < kills:
            over = threading.Event()
            kill = partial(_kill_now_and_then, pool, rng, kills - killed, over)
            killing = in_background(kill, "killing")
            output = Output(pool, tmp_path / str(rounds))
            events = output.events(in_memory(catalog), Thresholds(b_min=300, b_max=900))
            over.set()
            killed += killing.result()
            assert failures(events) == []
            output.check_all(catalog)
            rounds += 1
    assert killed == kills


def test_stopped_run_publishes_what_is_encoded_of_a_superbatch(
    faulty: Output, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    catalog: dict[str, Rows] = numbered_catalog([4_000] * 4)
    catalog["p3"] = _with(catalog["p3"], 3_999, f"hang once {hung}")
    run = faulty.run(in_memory(catalog), LARGE, grace_seconds=4.0)

    def stop_when_it_hangs() -> None:
        calls = faulty.pool._dispatcher._schedule.calls
        until(lambda: hung.exists() and calls and calls[0].finished_rows >= 8_000)
        run.stop()

    stopper = in_background(stop_when_it_hangs, "stopping")
    assert list(run.events())
    stopper.result()
    files = faulty.keys()
    assert {"p0", "p1"} <= files
    assert "p3" not in files
    assert run.report.partitions_written == len(files)
    assert run.report.texts_encoded >= 4_000 * len(files)
    again = faulty.embed(in_memory(catalog), LARGE)
    assert again.report.texts_encoded <= 4_000 * (4 - len(files))
    assert run.report.texts_encoded + again.report.texts_encoded == 16_000
    faulty.check_all(catalog)


class StuckStore(LocalStore):
    """A disk that blocks every file but the first until `go_on` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go_on = threading.Event()
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
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = numbered_catalog([60] * 6)
    store = StuckStore(output.root)
    run = output.run(in_memory(catalog), grace_seconds=0.5, store=store)
    events = run.events()
    try:
        assert next(events)
        assert store.stuck.wait(60)
        events.close()
        assert "could be published within the grace time" in caplog.text
        assert output.keys() >= {"p0"}
    finally:
        store.go_on.set()


def test_second_interrupt_ends_the_wait_and_every_thread(output: Output) -> None:
    store = StuckStore(output.root)
    catalog = numbered_catalog([60] * 6)
    run = output.run(
        in_memory(catalog), Thresholds(b_min=60, b_max=60), grace_seconds=3600, store=store
    )
    events = run.events()
    try:
        assert next(events)
        assert store.stuck.wait(60)
        with interrupted_in_another_thread():
            events.close()
    finally:
        store.go_on.set()
    wait_for_publishing_threads()


STUCK = """
import signal, sys
from pathlib import Path
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.pool import EncoderPool
from tests.engine.runs import in_memory, make_run
from tests.engine.run.test_run_endings import SPEC, StuckStore
from tests.small_catalogs import numbered_catalog
signal.signal(signal.SIGINT, signal.default_int_handler)
store = StuckStore(Path(sys.argv[1]))
catalog = numbered_catalog([60] * 6)
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
