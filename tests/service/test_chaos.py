"""Killed and stopped workers, and switches, while requests are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.current_space import read_current, write_current
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store import open_store
from tests.engine.runs import finish, in_memory, make_run
from tests.service.load import SPEC, Load
from tests.service.service_process import service_process
from tests.small_catalogs import Rows, numbered_rows
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

WORKER_KILLS = 100
SWITCHES = 20
ROWS = 10_000
FEW = {"few": numbered_rows("few", 10)}
PARTITION_EACH = Thresholds(b_min=ROWS, b_max=2 * ROWS)  # a SuperBatch of its own


def embed(output: Path, catalog: Mapping[str, Rows] = FEW, spec: EncodingSpec = SPEC) -> str:
    """Write the files of a run that nothing disturbs; gives the name of their space."""
    with EncoderPool(spec, devices="cpu") as pool:
        finish(make_run(pool, in_memory(catalog), output, PARTITION_EACH))
        return pool.space.name


def test_killed_and_stopped_workers_leave_no_request_without_answer(tmp_path: Path) -> None:
    space = embed(tmp_path / "out")
    with (
        service_process(tmp_path / "out") as service,
        Load(service.address, {space: 16}) as load,
    ):
        for number in range(WORKER_KILLS):
            side = ("query", "document")[number % 2]
            load.until_answered(side)
            worker = service.worker(side)
            worker.kill()
            until(lambda side=side, worker=worker: service.worker(side) != worker)
        load.until_answered()
        stopped = service.worker("query")
        stopped.suspend()
        until(lambda: service.status("/healthz") == 503)
        until(lambda: service.status("/healthz") == 200)
        assert service.worker("query") != stopped
        load.until_answered()
    assert load.wrong == []


def test_switches_under_load_are_followed_with_vectors_of_the_named_space(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    spaces = {embed(output, spec=replace(SPEC, model=f"hash://{size}")): size for size in (16, 24)}
    store = open_store(output)
    names = list(spaces)
    with service_process(output) as service, Load(service.address, spaces) as load:
        for number in range(1, SWITCHES + 1):
            name = names[number % 2]
            write_current(store, name, seen=read_current(store))
            until(lambda name=name: load.wrong or load.has_answer_of(name))
    assert load.wrong == []
