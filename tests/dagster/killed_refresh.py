"""Executes `catalog_refresh` in a process of its own and kills that process when so many partitions are on record.

Usage: python -m tests.dagster.killed_refresh CATALOG OUTPUT PARTITIONS
"""

from __future__ import annotations

import os
import signal
import sys

import dagster as dg

from surge_dagster.config.settings import load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.demo import execute, local_instance
from surge_dagster.orchestration.names import CatalogNames


def main(catalog: str, output: str, partitions: int) -> None:
    left = partitions

    def hear(event: dg.DagsterEvent) -> None:
        nonlocal left
        if event.is_step_materialization and event.asset_key == CatalogNames().embeddings:
            left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = load_settings(source=catalog, output=output, model="hash://16", b_min=30, b_max=60)
    with local_instance() as instance:
        execute(instance, embedding_catalog(settings).resolve_job_def("catalog_refresh"), hear)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
