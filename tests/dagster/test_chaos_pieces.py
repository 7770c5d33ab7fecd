"""Divided refreshes on hosts and a database that fail: all are embedded, and no run waits for a
dead host.

All of them together kill 42 hosts and 6 runs, cut 6 links and restart the database 12 times.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from surge_dagster.catalogs.synthetic import build_synthetic_catalog
from surge_dagster.orchestration.heartbeats import HEARTBEAT_TAG
from surge_dagster.orchestration.names import LOST_RUNS
from tests.cluster.hosts import ROOT, Host, hosts, parquet_files
from tests.cluster.servers import Database, socket_folder
from tests.dagster.conftest import NAMES, Workbench, shown
from tests.extras import require
from tests.service.lanes import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

PARTITIONS, MODEL, BIN = 120, "hash://64", Path(sys.executable).parent
FAULTS = ["host"] * 14 + ["run"] * 2 + ["link", "moment"] + ["database"] * 4
# The sensor's clock goes on by so much with each of its ticks. A run's sign of life comes each
# second here.
TICK_SECONDS = 6
RUN = """
import sys
from surge_dagster.orchestration import heartbeats
from tests.dagster.requested_run import main
heartbeats.TIMES = heartbeats.HeartbeatTimes(beat_seconds=1.0)
sys.exit(main(sys.argv[1]))
"""


@dataclass
class Fleet:
    """Hosts that execute the runs of the nightly schedule, one at a time each, as queue and run
    launcher place them.

    Attributes:
        lost: runs that were killed, with the time by the sensor's clock.
        cut: the host whose link is down.
    """

    bench: Workbench
    hosts: list[Host]
    env: dict[str, str]
    version: int = 0
    lost: dict[str, timedelta] = field(default_factory=dict)
    cut: Host | None = None
    _waiting: list[dg.RunRequest] = field(default_factory=list)
    _at_work: dict[Host, subprocess.Popen[str]] = field(default_factory=dict)
    _cursor: str | None = None
    # of a run over the whole catalog, after which nothing was begun
    _last: subprocess.Popen[str] | None = None

    def change(self) -> None:
        """All texts are others from now on."""
        self.version, self._last = self.version + 1, None
        build_synthetic_catalog(
            self.bench.catalog, texts=60_000, partitions=PARTITIONS, seed=self.version
        )

    def run_on(self, host: Host) -> dg.DagsterRun | None:
        """The run that is executed there."""
        runs = self.bench.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        found = (run for run in runs if f" {host.name} " in run.tags.get(HEARTBEAT_TAG, ""))
        return next((run for run in found if run.run_id not in self.lost), None)

    def step(self) -> bool:
        """A tick of `lost_runs`, and what schedule and queue do then; returns whether nothing is
        left to do."""
        self.bench.ahead += timedelta(seconds=TICK_SECONDS)
        self._cursor = self.bench.tick(LOST_RUNS, self._cursor).cursor
        self._see_lost_runs()
        free = [
            host
            for host in self.hosts
            if host not in self._at_work or self._at_work[host].poll() is not None
        ]
        if len(free) == len(self.hosts):
            self._fail_unstarted_runs()
        if not self._waiting and {*free, self.cut} >= set(self.hosts) and not self._active():
            requests = self.bench.scheduled()
            assert not isinstance(requests, str), requests
            is_last = [request.run_key for request in requests] == ["everything"]
            if is_last and self._last is not None and self._last.returncode == 0:
                return True
            self._waiting = list(requests)
        for host in free[: len(self._waiting)]:
            request = self._waiting.pop(0)
            self._begin(host, request)
            self._last = self._at_work[host] if request.run_key == "everything" else None
        return False

    def _active(self) -> list[dg.DagsterRun]:
        return [run for run in self.bench.instance.get_runs() if not run.is_finished]

    def _fail_unstarted_runs(self) -> None:
        """As Dagster's run monitoring does where a run's process ended before it could say that it
        had started."""
        for run in self._active():
            if run.status is dg.DagsterRunStatus.NOT_STARTED:
                self.bench.instance.report_run_failed(run)

    def _see_lost_runs(self) -> None:
        for run in self._active():
            since = self.lost.get(run.run_id)
            assert since is None or self.bench.ahead - since <= timedelta(seconds=80), run.tags

    def _begin(self, host: Host, request: dg.RunRequest) -> None:
        with (self.bench.root / f"{host.name}.log").open("a") as log:
            command = (sys.executable, "-c", RUN, NAMES.refresh_job)
            process = host.popen(
                *command, env=self.env, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(
                json.dumps({"run_config": dict(request.run_config), "tags": dict(request.tags)})
            )
        self._at_work[host] = process

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for a state, and keep the hosts at work."""

        def held() -> object:
            if self.step():
                self.change()
            return holds()

        until(held, 600)  # of a machine that other work keeps busy

    def published(self) -> set[tuple[str, int]]:
        """Each file, with the time of its publication."""
        return parquet_files(self.bench.output)

    def until_more_is_published(self, files: int = 3) -> None:
        before = self.published()
        self.until(lambda: len(self.published() - before) >= files)

    def victim(self, rng: random.Random) -> tuple[Host, dg.DagsterRun]:
        """A host that is at work, and its run."""
        at_work = list[tuple[Host, dg.DagsterRun]]()

        def found() -> object:
            at_work[:] = [
                (host, run) for host in self.hosts if (run := self.run_on(host)) is not None
            ]
            return at_work

        self.until(found)
        return rng.choice(at_work)

    def kill(self, host: Host, run: dg.DagsterRun, *, whole: bool) -> None:
        if whole:
            host.kill()
            host.boot()
        else:
            self._at_work[host].kill()
        self.lost[run.run_id] = self.bench.ahead

    def is_finished(self, run: dg.DagsterRun) -> bool:
        [found] = self.bench.instance.get_runs(dg.RunsFilter([run.run_id]))
        return found.is_finished


@pytest.mark.parametrize("seed", range(1, 4))
def test_pieces_survive_killed_hosts_cut_links_and_restarts_of_the_database(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    require("postgres", "psycopg2", "dagster_postgres")
    # Runs of some thousand texts, so that each host has several.
    monkeypatch.setattr("surge_dagster.orchestration.divided.LEAST_BYTES", 1 << 16)
    rng = random.Random(seed)
    with socket_folder() as sockets, hosts(5, bench.root, sockets) as made:
        *workers, base = made
        database = Database(base, sockets)
        database.start()
        bench.settings |= {"model": MODEL, "max_runs": 4 * len(workers)}
        settings = {"source": bench.catalog, "output": bench.output, **bench.settings}
        env = {f"SURGE_{name.upper()}": str(value) for name, value in settings.items()}
        home = database.home(bench.root / "hosts")
        env |= {
            "DAGSTER_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "true",
        }
        of_test = database.home(bench.root / "test", of_test=True)
        with dg.DagsterInstance.from_config(str(of_test)) as bench.instance:
            fleet = Fleet(bench, workers, env)
            live_through(fleet, database, rng, rng.sample(FAULTS, len(FAULTS)))
            workers[0].run(
                BIN / "surge-dagster",
                "verify",
                bench.catalog,
                bench.output,
                "--model",
                MODEL,
                "--reencode",
                "all",
            )
            assert_on_record(fleet)


def live_through(fleet: Fleet, database: Database, rng: random.Random, faults: list[str]) -> None:
    fleet.change()
    for fault in faults:
        fleet.until_more_is_published()
        host, run = fleet.victim(rng)
        match fault:
            case "database":
                database.restart()
            case "host" | "run":
                fleet.kill(host, run, whole=fault == "host")
            case _:
                host.cut()
                fleet.cut = host
                if fault == "link":
                    fleet.lost[run.run_id] = fleet.bench.ahead
                    fleet.until(partial(fleet.is_finished, run))
                else:
                    fleet.until_more_is_published()
                host.mend()
                fleet.cut = None
    until(fleet.step, 300)


def assert_on_record(fleet: Fleet) -> None:
    """Dagster shows each partition as embedded, each has one file, and no run is left."""
    keys = {
        path.name.removeprefix("partition=") for path in fleet.bench.catalog.glob("partition=*")
    }
    assert shown(fleet.bench) == (keys, set())
    assert len(keys) == len(fleet.published()) == PARTITIONS
    assert all(run.is_finished for run in fleet.bench.instance.get_runs())
