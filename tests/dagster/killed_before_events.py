"""Executes `catalog_refresh` in a process of its own and kills it when files are published and their events are not.

Usage: python -m tests.dagster.killed_before_events CATALOG OUTPUT

The first materialization of an embedding is stored; the batch that comes next is lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from surge_dagster.definitions import embedding_catalog
from surge_dagster.demo import execute, local_instance
from surge_dagster.orchestration import event_writer
from surge_dagster.orchestration.event_batches import Store, event_store
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_events import AnyEvent
from surge_dagster.settings import load_settings


def main(catalog: str, output: str) -> None:
    partitions = len(list(Path(catalog).iterdir()))
    stored: list[int] = []

    @contextmanager
    def store_of(context: dg.OpExecutionContext) -> Iterator[Store]:
        def store_the_first(events: Sequence[AnyEvent], wanted: bool) -> Sequence[int | None]:
            if events[0].asset_key == CatalogNames().embeddings and stored:
                while len(list(Path(output).glob("*/*.parquet"))) < partitions:
                    pass  # the others are on their way
                os.kill(os.getpid(), signal.SIGKILL)
            ids = store(events, wanted)
            if events[0].asset_key == CatalogNames().embeddings:
                stored.append(len(events))
            return ids

        with event_store(context) as store:
            yield store_the_first

    event_writer.event_store = store_of
    settings = load_settings(source=catalog, output=output, model="hash://16")
    with local_instance() as instance:
        execute(instance, embedding_catalog(settings).resolve_job_def("catalog_refresh"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
