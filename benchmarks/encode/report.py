"""The encode benchmark's table for people, and its aims."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.encode.sides import REFERENCE
from benchmarks.harness import Document, Target, at_most

# Of the matrix products alone, in the same precision.
_CPU_SHARES = {"fp32": 0.80, "bf16": 0.75}
_CPU_RATIOS = (
    ("short", "pool fp32", 3.6, 0.99999),
    ("short", "pool bf16", 6.3, 0.9999),
    ("long", "pool fp32", 3.2, 0.99999),
    ("long", "pool bf16", 4.8, 0.9999),
)


def lines(document: Document) -> Iterator[str]:
    for workload in document["workloads"]:
        yield from _workload(workload)
    yield ""
    call, start = document["call_cost"], document["start"]
    for name in ("pool", "sentence_transformers_pool"):
        low, high = call[name]["interval_ms"]
        yield f"fixed cost of a call, {name}: {call[name]['c_ipc_ms']:.3f} ms (95 %: {low:.3f} to {high:.3f})"
    yield f"fixed cost of a call, published system: {call['published_ms']:.0f} ms"
    yield (
        f"start with warm caches: pool {start['pool_start_seconds']:.2f} s, plain sentence-transformers load "
        f"{start['sentence_transformers_load_seconds']:.2f} s, ratio {start['ratio']:.2f}"
    )


def targets(document: Document) -> list[Target]:
    """All aims with what this run measured."""
    short = [workload for workload in document["workloads"] if workload["input"] == "short"]
    large = next((workload["superbatch"] for workload in short if workload["superbatch"]), {})
    run = next((row for workload in short for row in workload["rows"] if row["kind"] == "run"), {})
    name = "padding of short texts in one call" + (f" of {large['texts']:,}" if large else "")
    return [
        *(_gpu_targets(document) if document["device"] != "cpu" else _cpu_targets(document)),
        at_most(name, 0.03, large.get("padding_ratio")),
        at_most("idle share of the workers' time in a run", 0.05, run.get("worker_idle_ratio")),
        at_most("c_ipc in ms, upper end", 1.0, document["call_cost"]["pool"]["interval_ms"][1]),
        at_most("start, ratio to a plain load", 1.3, document["start"]["ratio"]),
    ]


def _cpu_targets(document: Document) -> Iterator[Target]:
    for workload, side, ratio, cosine in _CPU_RATIOS:
        row = _row(document, workload, side)
        note = row.get("missing", "")
        yield Target(f"{workload}, {side}, ratio", ratio, row.get("ratio"), note=note)
        yield Target(
            f"{workload}, {side}, lowest cosine", cosine, row.get("lowest_cosine"), note=note
        )
        if workload == "short":
            yield Target(
                f"{workload}, {side}, cold share of warm", 0.8, row.get("cold_share"), note=note
            )
            precision = side.removeprefix("pool ")
            share = row.get("ratio_to", {}).get(f"products-{precision}")
            yield Target(
                f"{workload}, {side}, share of matrix products",
                _CPU_SHARES[precision],
                share,
                note=note,
            )


def _gpu_targets(document: Document) -> Iterator[Target]:
    row = _row(document, "short", "pool fp16")
    note = row.get("missing", "")
    yield Target("short, pool fp16, texts/s", 150_000, row.get("texts_per_second"), note=note)
    ratio = row.get("ratio_to", {}).get("sentence-transformers-fp16")
    yield Target("short, pool fp16, ratio to sentence-transformers fp16", 10.0, ratio, note=note)
    yield Target("short, pool fp16, lowest cosine", 0.9999, row.get("lowest_cosine"), note=note)


def _row(document: Document, workload: str, side: str) -> Document:
    rows = [
        row for each in document["workloads"] if each["input"] == workload for row in each["rows"]
    ]
    return next((row for row in rows if row["side"] == side), {"missing": "not requested"})


def _workload(workload: Document) -> Iterator[str]:
    yield ""
    yield (
        f"{workload['input']}: {workload['texts']:,} texts of {workload['mean_text_bytes']:.1f} bytes and "
        f"{workload['mean_tokens']:.1f} tokens on average, {workload['model']}"
    )
    yield (
        f"{'':40}{'texts/s':>10}{'ratio':>8}{'rounds':>14}{'lowest cos':>12}{'mean cos':>11}{'padding':>9}{'idle':>7}"
    )
    for row in workload["rows"]:
        if "missing" in row:
            yield f"{row['side']:40}{'-':>10}  {row['missing']}"
            continue
        batch = f", batch {row['batch_size']}" if row.get("batch_size") else ""
        spread = f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}"
        yield (
            f"{row['side'] + batch:40}{row['texts_per_second']:>10,.0f}{row['ratio']:>7.2f}x{spread:>14}"
            f"{_cell(row.get('lowest_cosine'), '.7f', 12)}{_cell(row.get('mean_cosine'), '.7f', 11)}"
            f"{_cell(row.get('padding_ratio'), '.1%', 9)}{_cell(row.get('worker_idle_ratio'), '.1%', 7)}"
        )
        others = [(name, ratio) for name, ratio in row["ratio_to"].items() if name != REFERENCE]
        if others and row["kind"] != "peer":
            yield "    to others: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in others)
        if "cold_share" in row:
            yield (
                f"    first pass {row['cold_share']:.0%} of warm; {row['backend']} on {row['device']}: "
                f"{row['device_reason']}"
            )
    if large := workload["superbatch"]:
        yield (
            f"one call of {large['texts']:,} short texts: {large['texts_per_second']:,.0f} texts/s, padding "
            f"{large['padding_ratio']:.1%}, workers idle {large['worker_idle_ratio']:.1%}"
        )


def _cell(value: float | None, form: str, width: int) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"
