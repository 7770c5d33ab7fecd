"""Recall of the indexes that tables get from a hand-over, with each database's own defaults.

    surge-dagster catalog demo --limit 20000 --out catalog
    surge-dagster embed catalog output
    python -m benchmarks.indexes output [--dsn postgresql://…]

It shows the share of the ten nearest rows that each index finds, for 200 rows of the output as
queries. Without a dsn, pgvector is left out; its table `recall` must not exist. The output gets a
consumer for each index, so take one that is made for this.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import say, temporary_folder
from surge_dagster import changes
from surge_dagster.consumers.comparison import index_recall
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.target import Target


def targets(folder: str, dsn: str | None) -> Iterator[tuple[str, Target]]:
    """Yield a table for each index, with a name."""
    yield "lancedb ivf_pq", LanceTable(folder, "ivf_pq", index="ivf_pq")
    yield "lancedb hnsw", LanceTable(folder, "hnsw", index="hnsw")
    if dsn is not None:
        yield "pgvector hnsw", PgVectorTable(dsn, "recall")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("output")
    options.add_argument("--dsn")
    arguments = options.parse_args()
    with temporary_folder() as folder:
        for name, target in targets(str(folder), arguments.dsn):
            say(f"loading {name}")
            done = target.apply(partial(changes, arguments.output, name))
            recall = index_recall(done.feed, target)
            print(f"{name:16}{done.rows_sent:>10,} rows   recall@10 {recall:.3f}")


if __name__ == "__main__":
    main()
