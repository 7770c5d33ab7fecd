"""What each registered backend has to keep, so that a new one cannot forget it: finished work is
answered at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.loading import REGISTERED_BACKENDS
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.support.waiting import in_background
from tests.engine.encoder.conftest import column, encode, tiny_model
from tests.engine.encoder.held_backend import FIRST_TEXTS, SECOND_TEXTS
from tests.engine.endpoint.fault_server import MODEL, fault_server
from tests.engine.runs import in_memory, make_run, of_kind, receipts
from tests.small_catalogs import keys_of, numbered_catalog, numbered_rows
from tests.waiting import until

pytestmark = pytest.mark.processes
_MOST_SECONDS = 60.0
_ONE_PARTITION_EACH = Thresholds(b_min=1, b_max=100)


@dataclass(frozen=True, slots=True)
class HeldPool:
    """A pool with one worker, which holds back portions of two sizes; see `held_backend`."""

    pool: EncoderPool
    folder: Path

    def wait_for(self, name: str) -> None:
        until((self.folder / name).exists)

    def go_on(self, texts: int) -> None:
        (self.folder / f"go-on-{texts}").touch()

    def compute_first_while_second_waits(self) -> None:
        """Compute the first portion when the worker has tokenized the second one."""
        try:
            self.wait_for(f"tokenized-{SECOND_TEXTS}")
        finally:
            self.go_on(FIRST_TEXTS)


@pytest.fixture(scope="module", params=sorted(REGISTERED_BACKENDS))
def started_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeldPool]:
    """A pool of each registered backend, started once for the tests of this file."""
    folder = tmp_path_factory.mktemp("held")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        spec = EncodingSpec("hash://16")
        if request.param == "http":
            server = stack.enter_context(fault_server())
            spec = EncodingSpec(MODEL, endpoint=Endpoint(url=server.url))
        elif request.param != "hash":
            spec = EncodingSpec(str(tiny_model("bert_cls", tmp_path_factory.mktemp("model"))))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "encoder"))
        patch.setenv("HELD_BACKEND", request.param)
        patch.setenv("HELD_FOLDER", str(folder))
        with EncoderPool(spec, devices="cpu", backend="held_backend:load") as pool:
            pool.start()
            yield HeldPool(pool, folder)


@pytest.fixture
def held(started_pool: HeldPool) -> Iterator[HeldPool]:
    """The pool of a registered backend, whose worker is idle and has held nothing back yet."""
    for name in started_pool.folder.iterdir():
        name.unlink()
    try:
        yield started_pool
    finally:
        started_pool.go_on(FIRST_TEXTS)
        started_pool.go_on(SECOND_TEXTS)
        encode(started_pool.pool, ["the last text"])


def test_a_portion_is_answered_while_the_next_one_is_blocked(held: HeldPool) -> None:
    with held.pool.arena(slots=2, max_texts=10, max_bytes=1_000) as arena:
        first = arena.acquire()
        first.append(column(["text"] * FIRST_TEXTS))
        blocked = arena.acquire()
        blocked.append(column(["other"] * SECOND_TEXTS))

        first_call = held.pool.submit(first)
        blocked_call = held.pool.submit(blocked)
        held.compute_first_while_second_waits()
        answer = first_call.result(_MOST_SECONDS)
        held.go_on(SECOND_TEXTS)

        assert answer is not None
        assert blocked_call.result(_MOST_SECONDS) is not None


def test_a_stopped_run_publishes_what_was_computed_before_the_next(
    held: HeldPool, tmp_path: Path
) -> None:
    catalog = {
        "computed": numbered_rows("computed", FIRST_TEXTS),
        "blocked": numbered_rows("blocked", SECOND_TEXTS),
    }
    run = make_run(held.pool, in_memory(catalog), tmp_path, _ONE_PARTITION_EACH, grace_seconds=2.0)

    published = in_background(lambda: keys_of(receipts(run.events())), "consumer")
    held.compute_first_while_second_waits()
    held.wait_for(f"held-{SECOND_TEXTS}")
    run.stop()

    assert published.result() == ["computed"]


def test_encode_seconds_add_up_to_the_busy_time_of_the_worker(
    held: HeldPool, tmp_path: Path
) -> None:
    """The first portion is held until the second one waits in the worker, and both could be
    computed at once."""
    sizes = [FIRST_TEXTS, SECOND_TEXTS, 20, 50]
    run = make_run(held.pool, in_memory(numbered_catalog(sizes)), tmp_path, _ONE_PARTITION_EACH)

    held.go_on(SECOND_TEXTS)
    watcher = in_background(held.compute_first_while_second_waits, "watcher")
    reports = of_kind(run.events(), SuperBatchReport)
    watcher.result()

    seconds = 0.0
    for report in reports:
        sizes.remove(report.texts)
        assert 0 < report.costs.forward_seconds <= report.costs.encode_seconds
        seconds += report.costs.encode_seconds
    assert sizes == []
    assert seconds <= run.report.wall_seconds
