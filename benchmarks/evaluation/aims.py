"""What the evaluation is to reach, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.evaluation.theory import Rows
from benchmarks.harness import Target, at_most

Row = Mapping[str, Any]

_SMALLEST, _BATCHED, _LARGEST = 1_000_000, 2_000_000, 50_000_000
_BEYOND_FSB = (10_000_000, _LARGEST)
_VECTOR_BYTES = 4 * 384
_FULL = "make eval-full"


def aims(rows: Rows) -> Iterator[Target]:
    """Every aim; one that needs a larger catalog than was measured says so."""
    grown = {row["texts"]: row for row in rows.get("scaling", ()) if row["name"] == "SURGE async"}
    ours, batched = grown.get(_BATCHED), _named(rows, "scaling", f"{_BATCHED}").get("FSB 100K")
    throughput = _ratio(ours, "throughput", batched, "encoding")
    yield Target("2 million texts: throughput, of the encode calls of FSB alone", 0.97, throughput)
    yield at_most("2 million texts: memory, of FSB's", 0.1, _ratio(ours, "memory", batched))
    yield at_most("2 million texts: first output, s", 1.0, ours["ttfo_seconds"] if ours else None)
    for texts in _BEYOND_FSB:
        name, row = f"{texts // 1_000_000} million texts", grown.get(texts)
        throughput = _ratio(row, "throughput", batched, "encoding")
        yield Target(f"{name}: throughput, of the encode calls of FSB alone", 0.97, throughput, note=_FULL)
        share = row["memory"] * 1e9 / (texts * _VECTOR_BYTES) if row else None
        yield at_most(f"{name}: memory, of the vectors that FSB would hold", 0.1, share, note=_FULL)
    small, large = (grown.get(texts) for texts in (_SMALLEST, _LARGEST))
    throughput = _ratio(large, "throughput", small)
    yield Target("50 million texts: throughput, of that at one million", 0.98, throughput, note=_FULL)
    yield at_most("50 million texts: memory, of that at one million", 1.1, _ratio(large, "memory", small), note=_FULL)
    real = _named(rows, "real_models", "minilm")
    first = real["SURGE async"]["ttfo_seconds"] if real else None
    yield at_most("MiniLM on this machine: first output, s", 1.0, first)
    for profile in dict.fromkeys(row["group"] for row in rows.get("profiles", ())):
        row = _named(rows, "profiles", profile)["async"]
        yield at_most(f"{profile}: exposed I/O, share of the wall time", 0.01, row["exposed"] / row["wall_seconds"])
    speeds = [row["throughput"] for row in rows.get("profiles", ()) if row["name"] == "async"]
    spread = (max(speeds) - min(speeds)) / max(speeds) if speeds else None
    yield at_most("asynchronous throughput over the profiles, spread", 0.03, spread)
    packed = _named(rows, "packing", "1.72")
    for name in [name for name in packed if name.startswith("PB-PBP-LB")]:
        yield Target(f"throughput, of {name}", 1.0, packed["SURGE async"]["throughput"] / packed[name]["throughput"])
    limited = _named(rows, "bound", "2.5").get("SURGE async")
    share = limited["largest"] / limited["b_max"] if limited else None
    yield at_most("sigma 2.5: largest call, of B_max", 1.0, share)
    wrong = [row["wrong"] for row in rows.get("failures", ())]
    yield at_most("failures: partitions that are missing or differ", 0, sum(wrong) if wrong else None)


def _named(rows: Rows, experiment: str, group: str) -> Mapping[str, Row]:
    return {row["name"]: row for row in rows.get(experiment, ()) if row["group"] == group}


def _ratio(one: Row | None, name: str, other: Row | None, other_name: str = "") -> float | None:
    """None where one of the two was not measured."""
    return one[name] / other[other_name or name] if one and other else None
