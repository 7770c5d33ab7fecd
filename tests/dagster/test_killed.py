"""SIGKILL at any instant costs what was in flight and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import psutil
import pytest

from tests.dagster.conftest import ROOT, Workbench, requested
from tests.dagster.dev_server import MARK, eventually, processes_with

PARTITIONS, ROWS = 20, 10


def living(bench: Workbench) -> list[psutil.Process]:
    """Processes that a test has started and that have not ended."""
    return processes_with(MARK, str(bench.root))


INSTANTS = sorted(random.Random(7).sample(range(1, PARTITIONS + 1), 3))


@pytest.mark.soak  # test_live.py and test_nightly_runs.py have a killed run each
@pytest.mark.parametrize("instant", INSTANTS)
def test_run_killed_at_a_random_instant_is_completed_by_the_next_one(bench: Workbench, instant: int) -> None:
    for number in range(PARTITIONS):
        bench.write(f"p{number:02}", ROWS)
    environment = os.environ | {"DAGSTER_HOME": str(bench.root / "home"), MARK: str(bench.root)}
    command = [sys.executable, "-m", "tests.dagster.killed_refresh", bench.catalog, bench.output, str(instant)]
    killed = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    eventually("the end of the encoder's processes", lambda: not living(bench), seconds=20)

    on_disk = {path.stem: path.stat().st_mtime_ns for path in bench.output.glob("*/p*.parquet")}
    assert len(on_disk) >= instant
    assert requested(bench.tick()) in ([], [[f"p{n:02}" for n in range(PARTITIONS) if f"p{n:02}" not in on_disk]])
    bench.settings |= {"b_min": 30, "b_max": 60}
    ran = bench.refresh()
    assert ran.success
    assert ran.metrics()["texts_encoded"] == (PARTITIONS - len(on_disk)) * ROWS, "nothing is encoded a second time"
    assert {path.stem: path.stat().st_mtime_ns for path in bench.output.glob("*/p*.parquet")}.items() >= on_disk.items()
    assert all(check.passed for check in bench.run("catalog_check").checks().values())
    assert not list(bench.output.glob("*/.tmp*")), "what a dead writer left is swept up"


def test_a_run_in_the_terminal_ends_with_ctrl_c_and_leaves_no_process(bench: Workbench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    bench.write("a", [("x", f"wait for {gate}")])
    program = (
        "import sys; from surge_dagster.demo import *; from surge_dagster.definitions import embedding_catalog; "
        "from surge_dagster.config.settings import load_settings\n"
        "job = embedding_catalog(load_settings()).resolve_job_def('catalog_refresh')\n"
        "with local_instance() as instance:\n"
        "    try: execute(instance, job)\n"
        "    except KeyboardInterrupt: sys.exit(130)\n"
    )
    environment = os.environ | {
        "DAGSTER_HOME": str(bench.root / "home"),
        MARK: str(bench.root),
        "SURGE_SOURCE": str(bench.catalog),
        "SURGE_OUTPUT": str(bench.output),
        "SURGE_MODEL": "hash://16",
        "GATED_BACKEND": "1",
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=ROOT)
    workers = "surge_dagster.engine.encoder.worker.main"
    eventually("a worker", lambda: any(workers in p.cmdline() for p in living(bench)))
    eventually("the space, which a run makes when it begins", lambda: list(bench.output.glob("*/space.json")))
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    eventually("the end of the encoder's processes", lambda: not living(bench), seconds=20)
    [run] = bench.instance.get_runs()
    assert run.status == dg.DagsterRunStatus.CANCELED
    gate.touch()
    assert bench.refresh().success
