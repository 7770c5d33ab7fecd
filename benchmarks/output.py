"""The path from vectors to files: writing files, and the bound on memory.

    python -m benchmarks.output [--scenarios serialization,tiny,bound] [--quick]

Prints a table and, as the last line of standard output, one JSON document; docs/benchmarks.md explains it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

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
from benchmarks.output_bound import CASES, bound_document, bound_lines, bound_targets
from benchmarks.output_files import (
    serialization_document,
    serialization_lines,
    serialization_targets,
    tiny_document,
    tiny_lines,
)

SCENARIOS: Scenarios = {
    "serialization": (serialization_lines, serialization_targets),
    "tiny": (tiny_lines, lambda found: ()),
    "bound": (bound_lines, bound_targets),
}


def measure(arguments: argparse.Namespace) -> Document:
    """Run the requested scenarios and give the document."""
    rounds = arguments.rounds
    memory = Path(tempfile.mkdtemp(prefix="surge-bench-", dir=arguments.memory_folder))
    disk = Path(tempfile.mkdtemp(prefix="surge-bench-", dir=arguments.disk_folder))
    measures: dict[str, Callable[[], object]] = {
        "serialization": lambda: serialization_document(arguments.rows, rounds, memory, disk),
        "tiny": lambda: tiny_document(arguments.tiny_partitions, rounds, memory, disk),
        "bound": lambda: bound_document(
            list(CASES), arguments.bound_texts, arguments.bound_partitions, arguments.stall_seconds, disk
        ),
    }
    document = start_document("output", arguments, ("pyarrow", "numpy"))
    try:
        for scenario in arguments.scenarios:
            say(scenario)
            document[scenario] = measures[scenario]()
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    return document


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    quick = parser.parse_known_args(words)[0].quick
    add("--scenarios", type=names_of(SCENARIOS), default=list(SCENARIOS), help=f"of {','.join(SCENARIOS)}")
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add("--rows", type=_numbers, default=[1_000] if quick else [10_000, 100_000, 500_000], help="of the serialization")
    add("--tiny-partitions", type=int, default=100 if quick else 20_000, help="of ten texts (20,000)")
    add("--bound-texts", type=int, default=2_000 if quick else 500_000, help="of the largest partition (500,000)")
    add("--bound-partitions", type=int, default=20 if quick else 2_000, help="small ones beside it (2,000)")
    add("--stall-seconds", type=float, default=0.1 if quick else 30.0, help="that a store stalls (30)")
    add("--memory-folder", type=Path, default=Path("/dev/shm"), help="on a tmpfs (/dev/shm)")
    add("--disk-folder", type=Path, help="on the disk to measure (the folder for temporary files)")
    return parser.parse_args(words)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Parse, measure, print."""
    document = measure(parse())
    print_document(document, scenario_lines(SCENARIOS, document), scenario_targets(SCENARIOS, document))


if __name__ == "__main__":
    main()
