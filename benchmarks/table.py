"""The document for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.rounds import REFERENCE
from benchmarks.targets import Target

Document = dict[str, Any]


def lines(document: Document, aims: list[Target]) -> Iterator[str]:
    """The whole report, line by line."""
    machine = document["machine"]
    yield f"{machine['processor']}, {machine['cores']} cores; {machine['gpu'] or 'no GPU'}"
    for workload in document["workloads"]:
        yield from _workload(workload, document["settings"]["rounds"])
    yield from _costs(document)
    yield from aim_lines(aims)


def aim_lines(aims: list[Target]) -> Iterator[str]:
    """What was wanted beside what was measured."""
    yield from ("", f"{'aim':58}{'target':>12}{'measured':>12}")
    for aim in aims:
        sign = ">=" if aim.at_least else "<="
        measured = "-" if aim.measured is None else f"{aim.measured:,.6g}"
        verdict = {True: "met", False: "missed", None: f"not measured here: {aim.note or 'not asked for'}"}[aim.met]
        yield f"{aim.name:58}{f'{sign} {aim.target:,g}':>12}{measured:>12}  {verdict}"


def _workload(workload: Document, rounds: int) -> Iterator[str]:
    weights = ", random weights" if workload["random_weights"] else ""
    yield ""
    yield (
        f"{workload['input']}: {workload['texts']:,} texts of {workload['mean_text_bytes']:.1f} bytes and "
        f"{workload['mean_tokens']:.1f} tokens on average, {workload['model']}{weights}, median of {rounds} rounds"
    )
    yield (
        f"{'':40}{'texts/s':>10}{'ratio':>8}{'rounds':>14}{'lowest cos':>12}{'mean cos':>11}{'top-10':>8}"
        f"{'limit':>7}{'padding':>9}{'idle':>7}"
    )
    for row in workload["rows"]:
        if "missing" in row:
            yield f"{row['side']:40}{'-':>10}  {row['missing']}"
            continue
        spread = f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}"
        batch = f", batch {row['batch_size']}" if row.get("batch_size") else ""
        yield (
            f"{row['side'] + batch:40}{row['texts_per_second']:>10,.0f}{row['ratio']:>7.2f}x"
            f"{spread:>14}"
            f"{_cell(row.get('lowest_cosine'), '.7f', 12)}{_cell(row.get('mean_cosine'), '.7f', 11)}"
            f"{_cell(row.get('equal_neighbours'), '.1%', 8)}{_cell(row.get('share_of_matmul_limit'), '.0%', 7)}"
            f"{_cell(row.get('padding_ratio'), '.1%', 9)}{_cell(row.get('worker_idle_ratio'), '.1%', 7)}"
        )
        others = [(name, ratio) for name, ratio in row["ratio_to"].items() if name != REFERENCE]
        if others and row["kind"] != "peer":
            yield "    to others: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in others)
        if "cold_ratio" in row:
            yield (
                f"{'  first pass over the texts':40}{row['cold_texts_per_second']:>10,.0f}{row['cold_ratio']:>7.2f}x"
                f"  {row['cold_share']:.0%} of warm; {row['backend']} on {row['device']}: {row['device_reason']}"
            )
        if "matmul_limit_gflops" in row:
            yield (
                f"{'  matmul limit':40}{row['matmul_limit_gflops']:>10,.0f} GFLOP/s with "
                f"{row['matmul_limit_library']}; {row['share_of_matmul_limit_inside_passes']:.0%} of it inside the "
                "passes, the rest of the gap is padding and idle time"
            )
    if workload["superbatch"]:
        large = workload["superbatch"]
        yield (
            f"one call of {large['texts']:,} short texts: {large['texts_per_second']:,.0f} texts/s, padding "
            f"{large['padding_ratio']:.1%}, workers idle {large['worker_idle_ratio']:.1%}"
        )


def _costs(document: Document) -> Iterator[str]:
    call, start = document.get("call_cost"), document.get("start")
    yield ""
    if call:
        for name in ("pool", "sentence_transformers_pool"):
            low, high = call[name]["interval_ms"]
            yield f"fixed cost of a call, {name}: {call[name]['c_ipc_ms']:.3f} ms (95 %: {low:.3f} to {high:.3f})"
        yield f"fixed cost of a call, published system: {call['published_ms']:.0f} ms"
    if start:
        yield (
            f"start with warm caches: pool {start['pool_start_seconds']:.2f} s, plain sentence-transformers load "
            f"{start['sentence_transformers_load_seconds']:.2f} s, ratio {start['ratio']:.2f}"
        )


def _cell(value: float | None, form: str, width: int) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"
