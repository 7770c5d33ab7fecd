"""A forced run that a benchmark stops by a signal.

    python -m benchmarks.stopped_run CATALOG OUTPUT

SIGTERM ends it as it ends the command `embed`: what was computed is published within the grace
time. `$COUNTED_PORTIONS` names the file in which its worker writes down what it computes; the file
is emptied when the run begins.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from surge_dagster import EmbeddingRun, EncoderPool, EncodingSpec, open_source, open_store
from surge_dagster.terminal import TERMINATED_CODE, Terminated, terminable

# Too short for the next SuperBatch to end, so that it cannot hide that the one before was not
# answered.
_GRACE_SECONDS = 2.0


def main(catalog: str, output: str) -> int:
    with EncoderPool(
        EncodingSpec(), devices="cpu", backend="benchmarks.counting_backend:load"
    ) as pool:
        pool.start()
        # without the calls that were timed at the start
        Path(os.environ["COUNTED_PORTIONS"]).write_text("")
        run = EmbeddingRun(
            open_source(catalog),
            open_store(output),
            pool,
            force=True,
            grace_seconds=_GRACE_SECONDS,
        )
        try:
            with terminable(), contextlib.closing(run.events()) as events:
                print("started", flush=True)
                for _ in events:
                    pass
        except Terminated:
            return TERMINATED_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
