"""What Python processes that tests start do first, where this folder is on their path.

Dagster's daemons look every second instead of every 5 or 30: Dagster has no settings for it, and
the tests of one server would spend minutes waiting. Dagster stores that a run failed before it
stores the run's status, and the daemon looks at each failure once: where it looks between the two,
no run is launched again. Here it waits for the status. With GATED_BACKEND set, encoder pools use
the backend of `gated_backend`, and any text is worth a run of its own.
"""

import os
import sys
from typing import Any

if "dagster._daemon" in sys.orig_argv:
    import time

    import dagster._daemon.controller
    from dagster import RunsFilter
    from dagster._daemon.auto_run_reexecution.auto_run_reexecution import (
        consume_new_runs_for_automatic_reexecution,
    )
    from dagster._daemon.auto_run_reexecution.event_log_consumer import EventLogConsumerDaemon
    from dagster._daemon.daemon import IntervalDaemon

    _patient = IntervalDaemon.__init__

    def _quick(self: IntervalDaemon[Any], interval_seconds: float, **options: Any) -> None:
        _patient(self, min(interval_seconds, 1), **options)

    IntervalDaemon.__init__ = _quick
    dagster._daemon.controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1

    def _relaunch_ended(context: Any, records: Any, logger: Any) -> Any:
        ids = [record.dagster_run.run_id for record in records]
        while not all(record.dagster_run.is_finished for record in records):
            time.sleep(0.02)
            records = context.instance.get_run_records(RunsFilter(run_ids=ids))
        return consume_new_runs_for_automatic_reexecution(context, records, logger)

    EventLogConsumerDaemon.handle_updated_runs_fns = property(lambda self: [_relaunch_ended])  # pyright: ignore[reportAttributeAccessIssue]

if (
    os.environ.get("GATED_BACKEND")
    and "surge_dagster.engine.encoder.worker.main" not in sys.orig_argv
):
    from gated_backend import use_gated_backend

    use_gated_backend()
    if "dagster" in " ".join(sys.orig_argv):
        import surge_dagster.orchestration.divided

        surge_dagster.orchestration.divided.LEAST_BYTES = 5_000
