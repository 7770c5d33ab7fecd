"""Reads a table in processes that are killed: the n-th at the n-th step of the grouping, until one comes to its end.

    python -m tests.engine.tables.killed_grouping TABLE

Prints how many processes were killed and the rows of each partition, as JSON. Each process is forked from this one,
which has imported everything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.sources import formats
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.tables import grouping, table_rows
from tests.engine.sources.tables import contents, table_of

STEPS = [(grouping, "_divide"), (grouping, "_write_json"), (grouping._GroupWriter, "_add"), (disk_cache, "write_json")]


def killed_at(step: int) -> None:
    """Let this process die when it begins its n-th step."""
    passed = 0

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for holder, name in STEPS:
        setattr(holder, name, mortal(getattr(holder, name)))


def main() -> None:
    formats._BLOCK_BYTES, table_rows._BLOCK_ROWS = 4096, 1
    grouping._FILES, grouping._FILE_BYTES, grouping._WORKERS = 3, 3_000, 1
    pa.array(np.zeros(1))  # pyarrow imports pandas here where that is installed, which would take most of each process
    kills = 0
    while True:
        child = os.fork()
        if child == 0:
            killed_at(kills + 1)
            print(json.dumps({"kills": kills, "rows": contents(table_of(sys.argv[1]))}))
            sys.stdout.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return
        kills += 1


if __name__ == "__main__":
    main()
