"""What a tick of the sensor costs on a catalog that a refresh has embedded: CPU seconds of the evaluating process.

A fresh process evaluates the sensor as a code server does: a first tick, which knows nothing, then ticks with nothing
to do. Then it wipes the records from the instance and evaluates until every partition is registered again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import dagster as dg

from benchmarks.dagster_refresh import Project
from benchmarks.harness import Document, Target, at_most, say
from surge_dagster.definitions import embedding_catalog
from surge_dagster.orchestration.names import CatalogNames

_NAMES = CatalogNames()
_TICKS = 3


def sensor_document(project: Project) -> Document:
    """Evaluate ticks in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.dagster_sensor"]
    ran = subprocess.run(
        command, env=project.environment, cwd=project.folder, stdout=subprocess.PIPE, text=True, check=True
    )
    return {"partitions": project.refreshed["partitions"]} | json.loads(ran.stdout.splitlines()[-1])


def sensor_targets(found: Document) -> Iterator[Target]:
    """The aims of the scenario."""
    yield at_most("CPU seconds of a tick with nothing to do", 2.0, statistics.median(found["idle_ticks"]))


def sensor_lines(found: Document) -> Iterator[str]:
    """The table."""
    yield ""
    yield f"sensor at {found['partitions']:,} partitions, CPU seconds of a tick"
    for name in ("first_tick", "idle_ticks", "registering_ticks"):
        yield f"{name.replace('_', ' '):20}" + ", ".join(f"{seconds:.2f}" for seconds in found[name])


def main() -> None:
    """The process that evaluates the ticks."""
    definitions = embedding_catalog()
    sensor = definitions.get_repository_def().get_sensor_def(_NAMES.sensor)

    def tick(instance: dg.DagsterInstance) -> tuple[float, bool]:
        """CPU seconds of a tick, and whether it registered partitions."""
        before = len(instance.get_dynamic_partitions(_NAMES.partitions_name))
        begun = time.process_time()
        with dg.build_sensor_context(
            instance, repository_def=definitions.get_repository_def(), resources=definitions.resources
        ) as context:
            found = sensor.evaluate_tick(context)
        seconds = time.process_time() - begun
        say(f"  a tick of {seconds:.2f} s: {found.skip_message or f'{len(found.run_requests or ())} runs requested'}")
        return seconds, len(instance.get_dynamic_partitions(_NAMES.partitions_name)) > before

    with dg.DagsterInstance.get() as instance:
        first, _ = tick(instance)
        idle = [tick(instance)[0] for _ in range(_TICKS)]
        instance.wipe()
        registering = [tick(instance)]
        while registering[-1][1]:
            registering.append(tick(instance))
    measured = {
        "first_tick": [first],
        "idle_ticks": idle,
        "registering_ticks": [seconds for seconds, registered in registering if registered],
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
