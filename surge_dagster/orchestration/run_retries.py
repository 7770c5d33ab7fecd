"""Which runs Dagster may launch again.

Where run retries are on, Dagster launches every run again that failed, unless it is told otherwise: reading bad data
three times. A run's own attempts have tried again whatever may pass by then, so only a run whose process died is to be
launched again. The jobs say so themselves, whatever the instance says. A run that is launched for an asset is of no job
of ours, and the instance decides about it: `run_retries: {retry_on_asset_or_op_failure: false}`.
"""

from dagster._core.storage.tags import RETRY_ON_ASSET_OR_OP_FAILURE_TAG

RUN_TAGS = {RETRY_ON_ASSET_OR_OP_FAILURE_TAG: "false"}
