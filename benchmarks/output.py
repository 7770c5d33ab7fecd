"""The way from vectors to files: serialization, slow stores, tiny partitions, and the bound on memory.

    python -m benchmarks.output [--scenarios serialization,profiles,tiny,bound] [--quick] [--chart docs/images/….svg]

Prints a table and, as the last line of standard output, one JSON document. Sides that are compared take turns in one
run, and every figure that counts is a ratio of two of them; docs/benchmarks.md says what each one means.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import names_of
from benchmarks.environment import library_versions, machine_facts
from benchmarks.output_bound import CASES, bound_document
from benchmarks.output_profiles import PROFILES, profiles_document
from benchmarks.output_serialization import serialization_document
from benchmarks.output_table import output_lines, profiles_chart
from benchmarks.output_targets import output_targets
from benchmarks.output_tiny import tiny_document
from benchmarks.rounds import say

SCENARIOS = ("serialization", "profiles", "tiny", "bound")
_LIBRARIES = ("pyarrow", "numpy")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the scenarios that were asked for and give the document."""
    rounds = arguments.rounds
    memory = Path(tempfile.mkdtemp(prefix="surge-bench-", dir=arguments.memory_folder))
    disk = Path(tempfile.mkdtemp(prefix="surge-bench-", dir=arguments.disk_folder))
    load_before = os.getloadavg()[0]
    document: dict[str, Any] = {
        "benchmark": "output",
        "machine": machine_facts("cpu", None),
        "versions": library_versions(_LIBRARIES),
        "settings": {name: str(value) for name, value in vars(arguments).items()},
    }
    try:
        for scenario in arguments.scenarios:
            say(scenario)
            if scenario == "serialization":
                found = serialization_document(arguments.rows, rounds, memory, disk)
            elif scenario == "profiles":
                found = profiles_document(
                    arguments.profiles, arguments.profile_partitions, arguments.encoder_speed, rounds, memory
                )
            elif scenario == "tiny":
                found = tiny_document(arguments.tiny_partitions, rounds, memory, disk)
            else:
                found = bound_document(
                    list(CASES), arguments.bound_texts, arguments.bound_partitions, arguments.stall_seconds, disk
                )
            document[scenario] = found
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    document["load_average"] = [load_before, os.getloadavg()[0]]
    return document | {"targets": [aim.as_dict() for aim in output_targets(document)]}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    quick = parser.parse_known_args(words)[0].quick
    add("--scenarios", type=names_of(SCENARIOS), default=list(SCENARIOS), help=f"of {','.join(SCENARIOS)}")
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add("--rows", type=_numbers, default=[1_000] if quick else [10_000, 100_000, 500_000], help="of the serialization")
    add("--profiles", type=names_of(tuple(PROFILES)), default=list(PROFILES), help=f"of {','.join(PROFILES)}")
    add("--profile-partitions", type=int, default=4 if quick else 40, help="of a run on a profile (40)")
    add("--encoder-speed", type=float, default=10_000, help="texts per second of the profiles' encoder (10,000)")
    add("--tiny-partitions", type=int, default=100 if quick else 20_000, help="of ten texts (20,000)")
    add("--bound-texts", type=int, default=2_000 if quick else 500_000, help="of the largest partition (500,000)")
    add("--bound-partitions", type=int, default=20 if quick else 2_000, help="small ones beside it (2,000)")
    add("--stall-seconds", type=float, default=0.1 if quick else 30.0, help="that a store stands still (30)")
    add("--memory-folder", type=Path, default=Path("/dev/shm"), help="on a tmpfs (/dev/shm)")
    add("--disk-folder", type=Path, help="on the disk to measure (the folder for temporary files)")
    add("--chart", type=Path, help="write the storage profiles as a picture, SVG")
    return parser.parse_args(words)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Parse, measure, print."""
    arguments = parse()
    document = measure(arguments)
    print("\n".join(output_lines(document, output_targets(document))))
    if arguments.chart and "profiles" in document:
        arguments.chart.write_text(profiles_chart(document["profiles"]))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
