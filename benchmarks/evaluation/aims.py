"""The aims of the evaluation, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.evaluation.tables import Row, Rows, named
from benchmarks.harness import Target, at_most

_MILLION = 1_000_000
_VECTOR_BYTES = 4 * 384
_FULL = "make eval-full"


def aims(rows: Rows) -> Iterator[Target]:
    """Yield every aim; one that needs a larger catalog than was measured says so."""
    yield from _scaling_aims(rows)

    real = named(rows, "real_models", "minilm").get("SURGE async", {})
    yield at_most("MiniLM on this machine: first output, s", 1.0, real.get("ttfo_seconds"))

    runs = [row for row in rows.get("profiles", ()) if row["name"] == "async"]
    exposed = max((row["exposed"] / row["wall_seconds"] for row in runs), default=None)
    yield at_most("any store: exposed I/O, share of wall time", 0.01, exposed)
    speeds = [row["throughput"] for row in runs]
    spread = 1 - min(speeds) / max(speeds) if speeds else None
    yield at_most("any store: throughput, spread", 0.03, spread)

    packed = named(rows, "packing", "1.72")
    bins = [row for name, row in packed.items() if name.startswith("PB-PBP-LB")]
    better = max(bins, key=lambda row: row["throughput"], default=None)
    gain = _ratio(packed.get("SURGE async"), "throughput", better)
    yield Target("throughput, relative to the better PB-PBP-LB", 1.0, gain)

    limited = named(rows, "bound", "2.5").get("SURGE async")
    share = _ratio(limited, "largest", limited, "b_max")
    yield at_most("sigma 2.5: largest call, relative to B_max", 1.0, share)

    wrong = [row["wrong"] for row in rows.get("failures", ())]
    yield at_most("failures: wrong partitions", 0, sum(wrong) if wrong else None)


def _scaling_aims(rows: Rows) -> Iterator[Target]:
    """Yield the aims of growing catalogs."""
    grown = {row["texts"]: row for row in rows.get("scaling", ()) if row["name"] == "SURGE async"}
    batched = named(rows, "scaling", f"{2 * _MILLION}").get("FSB 100K")
    for millions in (2, 10, 50):
        name = f"{millions} million texts"
        note = "" if millions == 2 else _FULL
        row = grown.get(millions * _MILLION)
        throughput = _ratio(row, "throughput", batched, "encoding")
        yield Target(
            f"{name}: throughput, relative to FSB's encode calls",
            0.97,
            throughput,
            note=note,
        )
        if millions == 2:
            yield at_most(f"{name}: memory, relative to FSB's", 0.1, _ratio(row, "memory", batched))
            first = row["ttfo_seconds"] if row else None
            yield at_most(f"{name}: first output, s", 1.0, first)
        else:
            vectors = {"memory": millions * _MILLION * _VECTOR_BYTES / 1e9}
            memory = _ratio(row, "memory", vectors)
            yield at_most(f"{name}: memory, relative to FSB's vectors", 0.1, memory, note=note)

    small = grown.get(_MILLION)
    large = grown.get(50 * _MILLION)
    name = "50 million texts"
    throughput = _ratio(large, "throughput", small)
    yield Target(f"{name}: throughput, relative to one million's", 0.98, throughput, note=_FULL)
    memory = _ratio(large, "memory", small)
    yield at_most(f"{name}: memory, relative to one million's", 1.1, memory, note=_FULL)


def _ratio(row: Row | None, name: str, other: Row | None, other_name: str = "") -> float | None:
    """Return None if one of the two was not measured."""
    if row is None or other is None:
        return None
    return row[name] / other[other_name or name]
