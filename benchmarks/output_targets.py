"""What the output path is to reach, each beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.targets import Target

Document = dict[str, Any]


def output_targets(document: Document) -> list[Target]:
    """All aims of the scenarios that were run."""
    return [
        *(aim for size in document.get("serialization", []) for aim in _serialization(size)),
        *(_profiles(document["profiles"]) if "profiles" in document else []),
        *(_tiny(document["tiny"]) if "tiny" in document else []),
        *(_bound(document["bound"]) if "bound" in document else []),
    ]


def _serialization(size: Document) -> Iterator[Target]:
    rows = f"{size['rows']:,} rows"
    yield Target(f"{rows}, naive seconds over ours", 25, size["ratio_to_naive"])
    yield Target(f"{rows}, extra memory over the matrix", 1.1, size["extra_memory"], at_least=False)
    yield Target(f"{rows}, checks before writing, share", 0.05, size["validation_share"], at_least=False)


def _profiles(found: Document) -> Iterator[Target]:
    yield Target("asynchronous throughput over the profiles, spread", 0.03, found["async_spread"], at_least=False)


def _tiny(found: Document) -> Iterator[Target]:
    rates = found["partitions_per_second"]
    yield Target("tiny partitions/s on tmpfs", 2_000, rates["run on tmpfs"])
    yield Target("tiny partitions on disk, to the best bare loop", 0.9, found["ratio_to_loop"])
    yield Target("tiny partitions on disk, to a loop of one thread", 0.9, found["ratio_to_loop_of_one_thread"])


def _bound(found: Document) -> Iterator[Target]:
    for case in found["cases"]:
        above = (found["limit_bytes"] + found["allowance_bytes"]) / 1e6
        yield Target(
            f"{case['case']}, most of the ledger in MB",
            found["limit_bytes"] / 1e6,
            case["ledger_peak_bytes"] / 1e6,
            at_least=False,
        )
        yield Target(f"{case['case']}, MB above the start", above, case["above_start_bytes"] / 1e6, at_least=False)
