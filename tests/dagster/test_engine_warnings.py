"""Warnings of the engine are lines of the run in which they occur."""

from __future__ import annotations

import logging

import dagster as dg

from surge_dagster.orchestration.heartbeats import executing
from tests.dagster.conftest import Ran, Workbench, run_op

ENGINE = logging.getLogger("surge_dagster.engine.encoder.dispatcher")


@dg.op
def work(context) -> None:
    with executing(context):
        ENGINE.info("worker %d started", 7)
        ENGINE.warning("worker %d died", 7)
    ENGINE.warning("worker %d died later", 7)


def lines(ran: Ran) -> list[str]:
    return [line for line in ran.logged() if line.startswith("worker 7")]


def test_warning_of_the_engine_is_in_the_log_of_the_run(bench: Workbench) -> None:
    assert lines(run_op(bench, work)) == ["worker 7 died"]
