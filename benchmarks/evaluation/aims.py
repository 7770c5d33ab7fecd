"""The aims of the evaluation, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.evaluation.tables import Row, Rows
from benchmarks.harness import Target, at_most

_SMALLEST, _BATCHED, _LARGEST = 1_000_000, 2_000_000, 50_000_000
_BEYOND_FSB = (10_000_000, _LARGEST)
_VECTOR_BYTES = 4 * 384
_FULL = "make eval-full"


def aims(rows: Rows) -> Iterator[Target]:
    """Every aim; one that needs a larger catalog than was measured says so."""
    grown = {row["texts"]: row for row in rows.get("scaling", ()) if row["name"] == "SURGE async"}
    ours, batched = grown.get(_BATCHED), _named(rows, "scaling", f"{_BATCHED}").get("FSB 100K")
    throughput = _ratio(ours, "throughput", batched, "encoding")
    yield Target("2 million texts: throughput, relative to FSB's encode calls", 0.97, throughput)
    yield at_most(
        "2 million texts: memory, relative to FSB's", 0.1, _ratio(ours, "memory", batched)
    )
    yield at_most("2 million texts: first output, s", 1.0, ours["ttfo_seconds"] if ours else None)
    for texts in _BEYOND_FSB:
        name, row = f"{texts // 1_000_000} million texts", grown.get(texts)
        throughput = _ratio(row, "throughput", batched, "encoding")
        yield Target(
            f"{name}: throughput, relative to FSB's encode calls", 0.97, throughput, note=_FULL
        )
        share = row["memory"] * 1e9 / (texts * _VECTOR_BYTES) if row else None
        yield at_most(f"{name}: memory, relative to FSB's vectors", 0.1, share, note=_FULL)
    small, large = (grown.get(texts) for texts in (_SMALLEST, _LARGEST))
    throughput = _ratio(large, "throughput", small)
    yield Target(
        "50 million texts: throughput, relative to one million's", 0.98, throughput, note=_FULL
    )
    yield at_most(
        "50 million texts: memory, relative to one million's",
        1.1,
        _ratio(large, "memory", small),
        note=_FULL,
    )
    real = _named(rows, "real_models", "minilm").get("SURGE async")
    yield at_most(
        "MiniLM on this machine: first output, s", 1.0, real["ttfo_seconds"] if real else None
    )
    runs = [row for row in rows.get("profiles", ()) if row["name"] == "async"]
    exposed = [row["exposed"] / row["wall_seconds"] for row in runs]
    yield at_most("any store: exposed I/O, share of wall time", 0.01, max(exposed, default=None))
    speeds = [row["throughput"] for row in runs]
    spread = (max(speeds) - min(speeds)) / max(speeds) if speeds else None
    yield at_most("any store: throughput, spread", 0.03, spread)
    packed = _named(rows, "packing", "1.72")
    bins = [row["throughput"] for name, row in packed.items() if name.startswith("PB-PBP-LB")]
    gain = packed["SURGE async"]["throughput"] / max(bins) if bins else None
    yield Target("throughput, relative to the better PB-PBP-LB", 1.0, gain)
    limited = _named(rows, "bound", "2.5").get("SURGE async")
    share = limited["largest"] / limited["b_max"] if limited else None
    yield at_most("sigma 2.5: largest call, relative to B_max", 1.0, share)
    wrong = [row["wrong"] for row in rows.get("failures", ())]
    yield at_most("failures: wrong partitions", 0, sum(wrong) if wrong else None)


def _named(rows: Rows, experiment: str, group: str) -> Mapping[str, Row]:
    return {row["name"]: row for row in rows.get(experiment, ()) if row["group"] == group}


def _ratio(row: Row | None, name: str, other: Row | None, other_name: str = "") -> float | None:
    """None where one of the two was not measured."""
    return row[name] / other[other_name or name] if row and other else None
