"""Executes one run that the sensor requested, in a process of its own, as a run launcher does.

Usage: python -m tests.dagster.requested_run JOB, with {"run_config": …, "tags": …} on standard
input
"""

from __future__ import annotations

import json
import sys

from surge_dagster.definitions import embedding_catalog
from surge_dagster.demo import local_instance


def main(job: str) -> int:
    request = json.load(sys.stdin)
    with local_instance() as instance:
        result = (
            embedding_catalog()
            .resolve_job_def(job)
            .execute_in_process(
                instance=instance,
                run_config=request["run_config"],
                tags=request["tags"],
                raise_on_error=False,
            )
        )
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
