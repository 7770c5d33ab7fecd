"""Which runs Dagster may launch again.

Where run retries are on, Dagster launches every failed run again, unless its tags say otherwise, and reads bad data
three times. The attempts of a run have retried what is transient, so only a run whose process died is to be launched
again: the jobs say so themselves. For a run of an asset the instance decides: `run_retries:
{retry_on_asset_or_op_failure: false}`.
"""

RUN_TAGS = {"dagster/retry_on_asset_or_op_failure": "false"}
