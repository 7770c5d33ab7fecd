"""What Python processes that tests start do first, if this folder is on their path.

Dagster's daemons look every second. With GATED_BACKEND set, encoder pools use `gated_backend`.
"""

import os
import sys

if "dagster._daemon" in sys.orig_argv:
    from private_dagster import quicken_daemons

    quicken_daemons()

_IS_WORKER = "surge_dagster.engine.encoder.worker.main" in sys.orig_argv
if os.environ.get("GATED_BACKEND") and not _IS_WORKER:
    from gated_backend import use_gated_backend

    use_gated_backend()
