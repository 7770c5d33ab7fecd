"""What Dagster costs: the record of each partition, a whole refresh, a tick of the sensor, and the pages of the UI.

    python -m benchmarks.dagster [--scenarios events,refresh,sensor,pages] [--quick]

Prints a table and, as the last line of standard output, one JSON document; docs/benchmarks.md explains it. The
scenarios sensor and pages look at the instance that the refresh has filled, so they include it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.dagster_events import event_lines, event_targets, events_document
from benchmarks.dagster_pages import pages_document, pages_lines, pages_targets
from benchmarks.dagster_refresh import refresh_lines, refresh_targets, refreshed_project
from benchmarks.dagster_sensor import sensor_document, sensor_lines, sensor_targets
from benchmarks.harness import (
    Document,
    Scenarios,
    names_of,
    print_document,
    say,
    scenario_lines,
    scenario_targets,
    start_document,
)

SCENARIOS: Scenarios = {
    "events": (event_lines, event_targets),
    "refresh": (refresh_lines, refresh_targets),
    "sensor": (sensor_lines, sensor_targets),
    "pages": (pages_lines, pages_targets),
}


def measure(arguments: argparse.Namespace) -> Document:
    """Run the requested scenarios and give the document."""
    requested = set(arguments.scenarios)
    document = start_document("dagster", arguments, ("dagster", "dagster-postgres", "dagster-webserver", "SQLAlchemy"))
    if "events" in requested:
        say("events")
        document["events"] = events_document(
            arguments.events, arguments.single_events, arguments.many_events, arguments.rounds
        )
    if requested - {"events"}:
        say("refresh")
        with refreshed_project(arguments.partitions) as project:
            document["refresh"] = project.refreshed
            if "pages" in requested:
                say("pages")
                document["pages"] = pages_document(project, arguments.rounds, arguments.picture)
            if "sensor" in requested:  # last, because it wipes the records
                say("sensor")
                document["sensor"] = sensor_document(project)
    return document


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    quick = parser.parse_known_args(words)[0].quick
    add("--scenarios", type=names_of(SCENARIOS), default=list(SCENARIOS), help=f"of {','.join(SCENARIOS)}")
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add("--events", type=int, default=20 if quick else 2_000, help="partitions of a batched round (2,000)")
    add("--single-events", type=int, default=5 if quick else 200, help="partitions of a round event by event (200)")
    add("--many-events", type=int, default=40 if quick else 40_000, help="partitions of the measure of memory (40,000)")
    add("--partitions", type=int, default=40 if quick else 40_000, help="of refresh, sensor and pages (40,000)")
    add("--picture", type=Path, help="write a screenshot of the partition page, as PNG")
    return parser.parse_args(words)


def main() -> None:
    """Parse, measure, print."""
    document = measure(parse())
    print_document(document, scenario_lines(SCENARIOS, document), scenario_targets(SCENARIOS, document))


if __name__ == "__main__":
    main()
