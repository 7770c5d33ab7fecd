"""Makes Dagster's daemons look every second instead of every 5 or 30, where this folder is on the path.

Dagster has no settings for it, and the tests of one server would spend minutes waiting.
"""

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
