"""A catalog in production over many nightly runs, on a clock that the test advances.

The sensor's and the schedule's ticks are evaluated as Dagster's daemon does it; every run that they
request is a process of its own, as a run launcher starts it. The output is a bucket behind a real
S3 server. Tests of a nightly run look at the server's etags and the databases' rows, not at the
project's own reports.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil

from surge_dagster.config.settings import Settings, load_settings
from surge_dagster.engine.files.formats import file_name
from tests.dagster.conftest import NAMES, ROOT, Workbench
from tests.dagster.dev_server import MARK, eventually, processes_with
from tests.dagster.moving_catalog import MovingCatalog
from tests.engine.store.object_server import BUCKET, Fault, ObjectServer, Plan, always

_OUTPUT = f"s3://{BUCKET}/out"
_DOWN = always(Fault("status", 503, {"Retry-After": "0"}))
_CUT = always(Fault("reset_before"))


@dataclass(slots=True)
class Ended:
    """What became of one run: its exit code, the catalog keys whose objects it put, and what it
    printed."""

    code: int
    published: set[str]
    log: str = ""


@dataclass(slots=True)
class Production:
    """A catalog, its bucket, its Dagster instance, and the machine that it is all on."""

    bench: Workbench
    server: ObjectServer
    moving: MovingCatalog
    # names of the bucket's spaces, in the order they were begun
    spaces: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, bench: Workbench, server: ObjectServer, **settings: Any) -> Production:
        (bench.root / "tmp").mkdir()
        bench.catalog.mkdir()
        options = {
            "endpoint": server.url,
            "access_key_id": "anybody",
            "secret_access_key": "anything",
        }
        bench.settings |= {
            "output": _OUTPUT,
            "storage_options": options,
            "b_min": 30,
            "b_max": 60,
            **settings,
        }
        return cls(bench, server, MovingCatalog(bench.catalog))

    def settings(self) -> Settings:
        return load_settings(
            source=str(self.bench.catalog), **{"model": "hash://16", **self.bench.settings}
        )

    # What the daemon and an operator do

    def tick(self, hours: float) -> list[dg.RunRequest]:
        return list(self.bench.later(hours=hours).run_requests or [])

    def requested_tonight(self) -> list[dg.RunRequest]:
        requests = self.bench.scheduled()
        assert not isinstance(requests, str), requests
        return requests

    def execute(
        self,
        job: str,
        request: dg.RunRequest | None = None,
        *,
        apart: bool = True,
        killed_at: int = 0,
        down_at: int = 0,
    ) -> Ended:
        """A run, to its end, in a process of its own if `apart`.

        When the bucket is sent so many files, SIGKILL reaches the process, or it answers nothing
        but 503 from then on.
        """
        before = self.server.objects()
        config, tags = (request.run_config, request.tags) if request else ({}, {})
        try:
            if not apart:
                self._break(down_at, _DOWN)
                ran = self.bench.run(job, config, tags)
                # A request that obstore repeats may succeed when the bucket answers again.
                eventually("the end of requests that the run gave up", lambda: not _requests())
                return Ended(0 if ran.success else 1, self._published(before))
            with (self.bench.root / "run.log").open("w+") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.dagster.requested_run", job],
                    cwd=self.bench.root,
                    env=self._environment(),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                )
                if killed_at:
                    self._break(killed_at, _CUT, process.kill)
                else:
                    self._break(down_at, _DOWN)
                process.communicate(json.dumps({"run_config": config, "tags": tags}))
                log.seek(0)
                return Ended(process.returncode, self._published(before), log.read())
        finally:
            self.server.before = self.server.plan = None

    def _environment(self) -> dict[str, str]:
        values = {"source": self.bench.catalog, "model": "hash://16", **self.bench.settings}
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("SURGE_")
        }
        given = {
            f"SURGE_{name.upper()}": json.dumps(value) if isinstance(value, dict) else str(value)
            for name, value in values.items()
        }
        return (
            inherited
            | given
            | {
                "SURGE_CACHE_DIR": os.environ["SURGE_CACHE_DIR"],
                "DAGSTER_HOME": str(self.bench.root / "home"),
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(self.bench.root / "tmp"),
                MARK: str(self.bench.root),
            }
        )

    def _break(self, at: int, plan: Plan, what: Callable[[], None] = lambda: None) -> None:
        """Do something when so many files have been sent to the bucket, and follow a plan from the
        last of them on."""
        lock, files = threading.Lock(), Counter[str]()

        def before(method: str, target: str) -> None:
            if at and method == "PUT" and ".parquet" in target:
                with lock:
                    files["sent"] += 1
                    if files["sent"] >= at:
                        what()
                        self.server.plan = plan

        self.server.before = before

    # What is there

    def named(self, request: dg.RunRequest) -> list[str]:
        config = request.run_config["ops"][NAMES.embeddings_op]["config"]
        return config.get("keys") or []

    def _published(self, before: dict[str, str]) -> set[str]:
        """Catalog keys whose objects are others than before, in any space."""
        self.server.settle()
        after = self.server.objects()
        for key in after:
            if key.endswith("/space.json") and (space := key.split("/")[1]) not in self.spaces:
                self.spaces.append(space)
        names = self._object_names({*self.moving.rows, *self.moving.removed})
        return {
            names[key] for key, etag in after.items() if key in names and before.get(key) != etag
        }

    def _object_names(self, keys: set[str]) -> dict[str, str]:
        return {f"out/{file_name(space, key)}": key for space in self.spaces for key in keys}

    def stored(self, space: str) -> set[str]:
        objects = self.server.objects()
        return {
            key
            for key in {*self.moving.rows, *self.moving.removed}
            if f"out/{file_name(space, key)}" in objects
        }

    def rows_of_events(self) -> Counter[tuple[str, str]]:
        """Rows of the database that all runs share, by kind of event and asset."""
        with closing(
            sqlite3.connect(self.bench.root / "home" / "history" / "runs" / "index.db")
        ) as database:
            rows = database.execute(
                "SELECT dagster_event_type, asset_key, COUNT(*) FROM event_logs GROUP BY 1, 2"
            ).fetchall()
        return Counter(
            {(kind, json.loads(asset)[-1] if asset else ""): count for kind, asset, count in rows}
        )

    def rows_of_runs(self) -> int:
        total = 0
        for path in (self.bench.root / "home" / "history" / "runs").glob("*-*-*-*-*.db"):
            with closing(sqlite3.connect(path)) as database:
                total += database.execute("SELECT COUNT(*) FROM event_logs").fetchone()[0]
        return total

    def temporary_files(self) -> list[Path]:
        return list((self.bench.root / "tmp").iterdir())

    def living(self) -> list[psutil.Process]:
        return processes_with(MARK, str(self.bench.root))

    def statuses(self) -> dict[str, set[str]]:
        """The partitions of `embeddings` as the UI gets them, from Dagster's own GraphQL schema."""
        node = self.bench.ask(_STATUSES)["assetNodeOrError"]
        bar = node["assetPartitionStatuses"]
        found = {
            "all": set(node["partitionKeys"]),
            "materialized": set(bar["materializedPartitions"]),
            "failed": set(bar["failedPartitions"]),
            "in progress": set(bar["materializingPartitions"]),
        }
        counts = {name: node["partitionStats"][f"num{label}"] for name, label in _COUNTS.items()}
        assert counts == {name: len(keys) for name, keys in found.items()}, (
            "the bar and the counts beside it"
        )
        return found


_COUNTS = {
    "all": "Partitions",
    "materialized": "Materialized",
    "failed": "Failed",
    "in progress": "Materializing",
}
_STATUSES = """{ assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode {
    partitionKeys
    partitionStats { numPartitions numMaterialized numFailed numMaterializing }
    assetPartitionStatuses { ... on DefaultPartitionStatuses {
        materializedPartitions failedPartitions materializingPartitions } } } } }"""


def _requests() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "surge-request"]
