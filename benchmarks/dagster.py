"""What Dagster costs: the record of each partition, a tick of the sensor, a whole refresh, and the pages of its UI.

    python -m benchmarks.dagster [--scenarios events,sensor,refresh,pages] [--quick]

Prints a table with every aim beside what was measured and, as the last line of standard output, one JSON document;
docs/benchmarks.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.arguments import names_of
from benchmarks.dagster_events import event_lines, event_targets, events_document
from benchmarks.dagster_pages import pages_document, pages_lines, pages_targets
from benchmarks.dagster_refresh import refresh_lines, refresh_targets, refreshed_project
from benchmarks.dagster_sensor import sensor_document, sensor_lines, sensor_targets
from benchmarks.environment import library_versions, machine_facts
from benchmarks.rounds import say
from benchmarks.table import aim_lines
from benchmarks.targets import Target

SCENARIOS = ("events", "sensor", "refresh", "pages")
_LIBRARIES = ("dagster", "dagster-postgres", "dagster-webserver", "SQLAlchemy")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the scenarios that were asked for and give the document."""
    load_before = os.getloadavg()[0]
    document: dict[str, Any] = {
        "benchmark": "dagster",
        "machine": machine_facts("cpu", None),
        "versions": library_versions(_LIBRARIES),
        "settings": {name: str(value) for name, value in vars(arguments).items()},
    }
    for scenario in arguments.scenarios:
        if scenario == "events":
            say(scenario)
            document[scenario] = events_document(
                arguments.events, arguments.stock_events, arguments.many_events, arguments.rounds
            )
        elif scenario == "sensor":
            say(scenario)
            document[scenario] = sensor_document(arguments.sensor_partitions, arguments.rounds)
    if {"refresh", "pages"} & set(arguments.scenarios):
        say("refresh")
        with refreshed_project(arguments.refresh_partitions) as project:  # which the pages show
            document["refresh"] = project.refreshed
            if "pages" in arguments.scenarios:
                say("pages")
                document["pages"] = pages_document(project, arguments.rounds, arguments.picture)
    document["load_average"] = [load_before, os.getloadavg()[0]]
    return document | {"targets": [aim.as_dict() for aim in dagster_targets(document)]}


def dagster_targets(document: dict[str, Any]) -> list[Target]:
    """All aims of the scenarios that were run."""
    return [
        *(event_targets(document["events"]) if "events" in document else []),
        *(sensor_targets(document["sensor"]) if "sensor" in document else []),
        *(refresh_targets(document["refresh"]) if "refresh" in document else []),
        *(pages_targets(document["pages"]) if "pages" in document else []),
    ]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    quick = parser.parse_known_args(words)[0].quick
    add("--scenarios", type=names_of(SCENARIOS), default=list(SCENARIOS), help=f"of {','.join(SCENARIOS)}")
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add("--events", type=int, default=20 if quick else 2_000, help="partitions of a batched round (2,000)")
    add("--stock-events", type=int, default=5 if quick else 200, help="partitions of a round event by event (200)")
    add("--many-events", type=int, default=40 if quick else 40_000, help="partitions of the measure of memory (40,000)")
    add("--sensor-partitions", type=int, default=40 if quick else 40_000, help="that a tick looks at (40,000)")
    add("--refresh-partitions", type=int, default=40 if quick else 40_000, help="of refresh and pages (40,000)")
    add("--picture", type=Path, help="where to write what the page looks like, as PNG")
    return parser.parse_args(words)


def main() -> None:
    """Parse, measure, print."""
    document = measure(parse())
    machine, (low, high) = document["machine"], document["load_average"]
    print(f"{machine['processor']}, {machine['cores']} cores; load average {low:.1f} before, {high:.1f} after")
    if "events" in document:
        print("\n".join(event_lines(document["events"])))
    if "sensor" in document:
        print("\n".join(sensor_lines(document["sensor"])))
    if "refresh" in document:
        print("\n".join(refresh_lines(document["refresh"])))
    if "pages" in document:
        print("\n".join(pages_lines(document["pages"])))
    print("\n".join(aim_lines(dagster_targets(document))))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
