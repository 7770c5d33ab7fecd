"""The encode benchmark's table for people, and its aims."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Document, Target, at_most

# Of the matrix products, in the same precision.
_PRODUCT_SHARE = 0.80
_RATIOS = (
    ("short", "fp32", 3.6, 0.99999),
    ("short", "bf16", 6.3, 0.9999),
    ("long", "fp32", 3.2, 0.99999),
    ("long", "bf16", 4.8, 0.9999),
)


def lines(document: Document) -> Iterator[str]:
    """Yield the tables."""
    for workload in document["workloads"]:
        yield from _workload(workload)
    yield ""
    call = document["call_cost"]
    for name in ("pool", "sentence_transformers_pool"):
        low, high = call[name]["interval_ms"]
        cost = call[name]["c_ipc_ms"]
        yield f"fixed cost of a call, {name}: {cost:.3f} ms (95 %: {low:.3f} to {high:.3f})"
    start = document["start"]
    load = start["sentence_transformers_load_seconds"]
    yield f"start with warm caches: pool {start['pool_start_seconds']:.2f} s, load {load:.2f} s"


def _workload(workload: Document) -> Iterator[str]:
    yield ""
    yield (
        f"{workload['input']}: {workload['texts']:,} texts of {workload['mean_tokens']:.1f} "
        "tokens on average"
    )
    yield f"{'':40}{'texts/s':>10}{'ratio':>8}{'rounds':>14}{'lowest cos':>12}"
    for row in workload["rows"]:
        if "missing" in row:
            yield f"{row['side']:40}{'-':>10}  {row['missing']}"
            continue
        name = row["side"]
        if row.get("batch_size"):
            name += f", batch {row['batch_size']}"
        spread = f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}"
        cosine = ""
        if "lowest_cosine" in row:
            cosine = f"{row['lowest_cosine']:.7f}"
        rate = row["texts_per_second"]
        yield f"{name:40}{rate:>10,.0f}{row['ratio']:>7.2f}x{spread:>14}{cosine:>12}"
        if row["kind"] == "pool":
            yield f"    first pass {row['cold_share']:.0%} of warm; {row['device_reason']}"
    large = workload["superbatch"]
    if large:
        yield (
            f"one call of {large['texts']:,} texts: {large['texts_per_second']:,.0f} texts/s, "
            f"padding {large['padding_ratio']:.1%}, workers idle {large['worker_idle_ratio']:.1%}"
        )


def targets(document: Document) -> Iterator[Target]:
    """Yield all aims with what this run measured."""
    for workload, precision, ratio, cosine in _RATIOS:
        side = f"pool {precision}"
        row = _row(document, workload, side)
        name = f"{workload}, {side}"
        note = row.get("missing", "")
        yield Target(f"{name}, ratio", ratio, row.get("ratio"), note=note)
        yield Target(f"{name}, lowest cosine", cosine, row.get("lowest_cosine"), note=note)
        if workload == "short":
            yield Target(f"{name}, cold share of warm", 0.8, row.get("cold_share"), note=note)
            share = row.get("share_of_products")
            yield Target(f"{name}, share of matrix products", _PRODUCT_SHARE, share, note=note)

    large: Document = {}
    for workload in document["workloads"]:
        large = workload["superbatch"] or large
    yield at_most("padding of short texts in one call", 0.03, large.get("padding_ratio"))
    idle = _row(document, "short", "run").get("worker_idle_ratio")
    yield at_most("idle share of the workers' time in a run", 0.05, idle)
    longest = document["call_cost"]["pool"]["interval_ms"][1]
    yield at_most("c_ipc in ms, upper end", 1.0, longest)
    yield at_most("start, ratio to a plain load", 1.3, document["start"]["ratio"])


def _row(document: Document, name: str, side: str) -> Document:
    """Return what was measured of a side on a workload."""
    for workload in document["workloads"]:
        for row in workload["rows"]:
            if workload["input"] == name and row["side"].startswith(side):
                return row
    return {"missing": "not requested"}
