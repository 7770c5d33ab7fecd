"""A run in the terminal that is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import psutil
import pytest

from tests.dagster.conftest import ROOT, Workbench
from tests.dagster.dev_server import MARK, eventually, processes_with

pytestmark = pytest.mark.processes


def living(bench: Workbench) -> list[psutil.Process]:
    return processes_with(MARK, str(bench.root))


def test_a_run_in_the_terminal_ends_with_ctrl_c_and_leaves_no_process(
    bench: Workbench, tmp_path: Path
) -> None:
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
    eventually(
        "the space, which a run makes when it begins",
        lambda: list(bench.output.glob("*/space.json")),
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    eventually("the end of the encoder's processes", lambda: not living(bench), seconds=20)
    [run] = bench.instance.get_runs()
    assert run.status == dg.DagsterRunStatus.CANCELED
    gate.touch()
    assert bench.refresh().success
