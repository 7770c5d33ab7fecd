"""What this project wants to reach, each beside what was measured: met, missed, or not measured here and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

Document = dict[str, Any]

_CPU_RATIOS = (
    ("short", "pool fp32", 3.6, 0.99999),
    ("short", "pool bf16", 6.3, 0.9999),
    ("long", "pool fp32", 3.2, 0.99999),
    ("long", "pool bf16", 4.8, 0.9999),
)


@dataclass(frozen=True, slots=True)
class Target:
    """One aim. `measured` is None where this run could not measure it; `note` says why."""

    name: str
    target: float
    measured: float | None
    at_least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_dict(self) -> Document:
        return asdict(self) | {"met": self.met}


def targets(document: Document) -> list[Target]:
    """All aims with the figures of this run's document."""
    on_gpu = document["machine"]["device"] != "cpu"
    found = list(_gpu_targets(document) if on_gpu else _cpu_targets(document))
    large = _superbatch(document)
    run = next((row for row in _rows(document, "short") if row["kind"] == "run"), {})
    call, start = document.get("call_cost"), document.get("start")
    name = "padding of short texts in one call" + (f" of {large['texts']:,}" if large else "")
    return [
        *found,
        Target(name, 0.03, large.get("padding_ratio"), at_least=False),
        Target("idle share of the workers' time in a run", 0.05, run.get("worker_idle_ratio"), at_least=False),
        Target("c_ipc in ms, upper end", 1.0, call and call["pool"]["interval_ms"][1], at_least=False),
        Target("start, ratio to a plain load", 1.3, start and start["ratio"], at_least=False),
    ]


def _cpu_targets(document: Document) -> Iterator[Target]:
    for workload, side, ratio, cosine in _CPU_RATIOS:
        row = _row(document, workload, side)
        note = row.get("missing", "")
        yield Target(f"{workload}, {side}, ratio", ratio, row.get("ratio"), note=note)
        yield Target(f"{workload}, {side}, lowest cosine", cosine, row.get("lowest_cosine"), note=note)
        if workload == "short":
            yield Target(f"{workload}, {side}, cold share of warm", 0.8, row.get("cold_share"), note=note)
            share = row.get("share_of_matmul_limit")
            yield Target(f"{workload}, {side}, share of the matmul limit", 0.85, share, note=note)


def _gpu_targets(document: Document) -> Iterator[Target]:
    row = _row(document, "short", "pool fp16")
    note = row.get("missing", "")
    yield Target("short, pool fp16, texts/s", 150_000, row.get("texts_per_second"), note=note)
    against = row.get("ratio_to", {}).get("sentence-transformers-fp16")
    yield Target("short, pool fp16, ratio to sentence-transformers fp16", 10.0, against, note=note)
    yield Target("short, pool fp16, lowest cosine", 0.9999, row.get("lowest_cosine"), note=note)


def _workloads(document: Document, name: str) -> list[Document]:
    """The default model's workload of this name, if it was measured; models of random weights have no aims."""
    return [found for found in document["workloads"] if found["input"] == name and not found["random_weights"]]


def _rows(document: Document, workload: str) -> list[Document]:
    return [row for found in _workloads(document, workload) for row in found["rows"]]


def _row(document: Document, workload: str, side: str) -> Document:
    rows = [row for row in _rows(document, workload) if row["side"] == side]
    return rows[0] if rows else {"missing": "not asked for"}


def _superbatch(document: Document) -> Document:
    return next((found["superbatch"] for found in _workloads(document, "short") if found["superbatch"]), {})
