"""A run's memory does not follow the number of partitions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.dagster.conftest import ROOT


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_memory_of_a_run_over_forty_thousand_partitions_stays_flat() -> None:
    """Takes some four minutes: eighty thousand events."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.dagster",
        "--scenarios",
        "refresh",
        "--partitions",
        "40000",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    document = json.loads(finished.stdout.splitlines()[-1])
    assert document["refresh"]["partitions"] == 40_000
    assert [aim["met"] for aim in document["targets"]] == [True], document["refresh"]
