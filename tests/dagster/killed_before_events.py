"""Executes `catalog_refresh` in a process of its own and kills it when files are published and
their events are not.

Usage: python -m tests.dagster.killed_before_events CATALOG OUTPUT

The first materialization of an embedding is stored; the batch that comes next is lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from surge_dagster.config.settings import load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.demo import execute, local_instance
from surge_dagster.orchestration import events, run_events
from surge_dagster.orchestration.dagster_internals import Event
from surge_dagster.orchestration.names import CatalogNames


def main(catalog: str, output: str) -> None:
    partitions = len(list(Path(catalog).iterdir()))
    stored: list[int] = []

    report = run_events.report_events

    def report_the_first(
        instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, batch: Sequence[Event]
    ) -> None:
        of_files = [event for event in batch if event.asset_key == CatalogNames().embeddings]
        if of_files and stored:
            while len(list(Path(output).glob("*/*.parquet"))) < partitions:
                pass  # the others are on their way
            os.kill(os.getpid(), signal.SIGKILL)
        report(instance, context, batch)
        stored.append(len(of_files)) if of_files else None

    run_events.report_events = report_the_first
    events.BATCH_EVENTS = 2  # a source's and an embedding's
    settings = load_settings(source=catalog, output=output, model="hash://16")
    with local_instance() as instance:
        execute(instance, embedding_catalog(settings).resolve_job_def("catalog_refresh"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
