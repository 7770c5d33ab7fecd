"""What Python processes that tests start do first, where this folder is on their path.

Dagster's daemons look every second instead of every 5 or 30: Dagster has no settings for it, and the tests of one
server would spend minutes waiting. With GATED_BACKEND set, encoder pools use the backend of `gated_backend`,
and any text is worth a shard of its own.
"""

import os
import sys
from typing import Any

if "dagster._daemon" in sys.orig_argv:
    import dagster._daemon.controller
    from dagster._daemon.daemon import IntervalDaemon

    _patient = IntervalDaemon.__init__

    def _quick(self: IntervalDaemon[Any], interval_seconds: float, **options: Any) -> None:
        _patient(self, min(interval_seconds, 1), **options)

    IntervalDaemon.__init__ = _quick
    dagster._daemon.controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1

if os.environ.get("GATED_BACKEND") and "surge_dagster.engine.encoder.worker.main" not in sys.orig_argv:
    from gated_backend import use_gated_backend

    use_gated_backend()
    if "dagster" in " ".join(sys.orig_argv):
        import surge_dagster.orchestration.shards

        surge_dagster.orchestration.shards.SHARD_BYTES = 1
