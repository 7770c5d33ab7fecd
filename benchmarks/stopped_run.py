"""A forced run that prints how far it is, for a benchmark that stops it by a signal.

    python -m benchmarks.stopped_run CATALOG OUTPUT

Prints a line every 50 ms: how many texts have their vectors, and how many are in files. SIGTERM ends it as it ends the
command `embed`: what was encoded is published within the grace time.
"""

from __future__ import annotations

import contextlib
import sys

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.waiting import every
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.terminal import TERMINATED_CODE, Terminated, terminable

_PRINT_SECONDS = 0.05


def main(catalog: str, output: str) -> int:
    published = 0

    def print_progress() -> None:
        encoded = 0 if run.in_flight is None else run.in_flight.encoded
        print(encoded, published, flush=True)

    with EncoderPool(EncodingSpec(), devices="cpu") as pool:
        run = EmbeddingRun(open_source(catalog), open_store(output), pool, force=True)
        try:
            with (
                terminable(),
                every(_PRINT_SECONDS, print_progress, "surge-benchmark"),
                contextlib.closing(run.events()) as events,
            ):
                for event in events:
                    if isinstance(event, Receipt):
                        published += event.rows
        except Terminated:
            return TERMINATED_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
