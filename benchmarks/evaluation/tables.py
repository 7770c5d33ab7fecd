"""The tables of the page: what was measured, with the paper's value in italics behind it.

Each function takes the document's rows by experiment and gives lines of Markdown. An experiment that was not measured
gives a line that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.evaluation import published
from benchmarks.evaluation.cells import beside, head, line
from benchmarks.evaluation.scales import SEED
from benchmarks.evaluation.theory import Rows, calls, decisions, lemma, theorem, workload
from surge_dagster.catalogs.synthetic import partition_sizes
from surge_dagster.engine.plan.cost_model import variation

Row = Mapping[str, Any]
Column = tuple[str, str, str]  # heading, name of the value, format

_THROUGHPUT: Column = ("texts/s", "throughput", ",.0f")
_DUTY: Column = ("duty", "duty", ".1%")
_RHO: Column = ("rho", "rho", ".2f")
_MEMORY: Column = ("memory, GB", "memory", ".2f")
_TTFO: Column = ("first output, s", "ttfo", ",.1f")
_CALLS: Column = ("calls", "calls", ",d")
_LARGEST: Column = ("largest call, texts", "largest", ",d")
_EXPOSED: Column = ("exposed I/O, s", "exposed", ".2f")
_TAIL: Column = ("after the last call, s", "tail", ".2f")


def end_to_end(rows: Rows) -> Iterator[str]:
    yield from _compared(
        rows["end_to_end"], published.END_TO_END, _THROUGHPUT, _DUTY, _RHO, _MEMORY, _TTFO, _CALLS, _EXPOSED, _TAIL
    )


def cost(rows: Rows) -> Iterator[str]:
    """Section 5.11, at the price of the paper's node."""
    yield from head("", "$ per million texts", "*paper*")
    for row in rows["end_to_end"]:
        values = published.END_TO_END.get(row["name"], {})
        theirs = f"*{_price(values['throughput']):.2f}*" if values else ""
        yield line(row["name"], f"{_price(row['throughput']):.3f}", theirs)


def _price(texts_per_second: float) -> float:
    return published.PRICE_PER_HOUR / 3_600 * 1e6 / texts_per_second


def packing(rows: Rows) -> Iterator[str]:
    at_home = [row for row in rows["packing"] if row["group"] == "1.72"]
    yield from _compared(at_home, published.PACKING, _THROUGHPUT, _MEMORY, _TTFO, _CALLS, _LARGEST)


def bound(rows: Rows) -> Iterator[str]:
    yield from head("", "largest call, texts", "B_max", "memory, GB")
    for row in rows["bound"]:
        yield line(row["name"], f"{row['largest']:,}", f"{row['b_max']:,}", f"{row['memory']:.2f}")


def ablation(rows: Rows) -> Iterator[str]:
    full = rows["ablation"][0]["throughput"]
    changed = [
        {**row, "change": row["throughput"] / full - 1 if index else None} for index, row in enumerate(rows["ablation"])
    ]
    change: Column = ("change", "change", "+.1%")
    yield from _compared(changed, published.ABLATION, _THROUGHPUT, change, _DUTY, _MEMORY, _TTFO)


def models(rows: Rows) -> Iterator[str]:
    """Table 4 with simulated encoders; MiniLM's rows are those of table 1."""
    groups: dict[str, list[Row]] = {
        "MiniLM": [row for row in rows["end_to_end"] if row["name"] in published.MODELS["MiniLM"]]
    }
    for row in rows["models"]:
        groups.setdefault(row["group"], []).append(row)
    yield from head("model", "", "texts/s", "memory, GB", "first output, s", "speedup over PBP")
    for model, found in groups.items():
        theirs = published.MODELS[model]
        for row in found:
            paper = theirs[row["name"]]
            gain = beside(
                row["throughput"] / found[0]["throughput"], paper["throughput"] / theirs["PBP"]["throughput"], ".2f"
            )
            cells = [beside(row[name], paper.get(name), form) for _, name, form in (_THROUGHPUT, _MEMORY, _TTFO)]
            yield line(model, row["name"], *cells, gain)


def real_models(rows: Rows) -> Iterator[str]:
    yield from head("model", "", "texts", "texts/s", "duty", "memory, GB", "first output, s", "exposed I/O, s")
    for row in rows["real_models"]:
        cells = [format(row[name], form) for _, name, form in (_THROUGHPUT, _DUTY, _MEMORY)]
        yield line(
            row["group"], row["name"], f"{row['texts']:,}", *cells, f"{row['ttfo']:.2f}", f"{row['exposed']:.2f}"
        )


def sigmas(rows: Rows) -> Iterator[str]:
    yield from head("sigma", "CV", "PBP", "SURGE", "speedup", "memory, GB", "first output, s", "largest call, texts")
    for sigma, paper in published.SIGMAS.items():
        ours = {row["name"]: row for row in rows["packing"] if row["group"] == f"{sigma}"}
        surge, pbp = ours["SURGE async"], ours["PBP"]
        cv = variation(partition_sizes(surge["texts"], surge["partitions"], sigma, SEED))
        yield line(
            f"{sigma}",
            beside(cv, paper["cv"], ".2f"),
            beside(pbp["throughput"], paper["pbp"], ",.0f"),
            beside(surge["throughput"], paper["throughput"], ",.0f"),
            beside(surge["throughput"] / pbp["throughput"], paper["speedup"], ".2f"),
            beside(surge["memory"], paper["memory"], ".2f"),
            beside(surge["ttfo"], paper["ttfo"], ".1f"),
            f"{surge['largest']:,}",
        )


def profiles(rows: Rows) -> Iterator[str]:
    yield from head("store", "sync", "async", "gain", "rho sync", "rho async", "exposed I/O, s: sync", "async")
    for profile, paper in published.PROFILES.items():
        ours = {row["name"]: row for row in rows["profiles"] if row["group"] == profile}
        sync, async_ = ours["sync"], ours["async"]
        yield line(
            profile,
            beside(sync["throughput"], paper["sync"], ",.0f"),
            beside(async_["throughput"], paper["async"], ",.0f"),
            beside(async_["throughput"] / sync["throughput"] - 1, paper["gain"], "+.1%"),
            beside(sync["rho"], paper["rho_sync"], ".2f"),
            beside(async_["rho"], paper["rho_async"], ".2f"),
            f"{sync['exposed']:.2f}",
            f"{async_['exposed']:.2f}",
        )


def thresholds(rows: Rows) -> Iterator[str]:
    theirs = {f"{b_min:,}": values for b_min, values in published.THRESHOLDS.items()}
    yield from _compared(rows["thresholds"], theirs, _THROUGHPUT, _DUTY, _TTFO, _CALLS, _MEMORY, heading="B_min")


def serialization(rows: Rows) -> Iterator[str]:
    yield from head("rows", "naive, s", "engine, s", "faster", "naive, MB", "engine, MB")
    for row in rows["serialization"]:
        paper = published.SERIALIZATION.get(row["rows"], {})
        cells = [
            beside(row[name], paper.get(name), form)
            for name, form in (("naive_seconds", ",.2f"), ("seconds", ",.2f"), ("naive_mb", ",.0f"), ("mb", ",.0f"))
        ]
        faster = paper["naive_seconds"] / paper["seconds"] if paper else None
        gain = beside(row["naive_seconds"] / row["seconds"], faster, ".1f")
        yield line(f"{row['rows']:,}", *cells[:2], gain, *cells[2:])


def scaling(rows: Rows) -> Iterator[str]:
    headings = (
        "texts/s",
        "encode calls alone",
        "duty",
        "memory, GB",
        "first output, s",
        "calls",
        "largest call, texts",
    )
    yield from head("texts", "partitions", "", *headings)
    for row in rows["scaling"]:
        paper = published.SCALING.get(round(row["texts"] / 1e6), {}).get(row["name"], {})
        yield line(
            f"{row['texts']:,}",
            f"{row['partitions']:,}",
            row["name"],
            beside(row["throughput"], paper.get("throughput"), ",.0f"),
            f"{row['encoding']:,.0f}",
            beside(row["duty"], paper.get("duty"), ".1%"),
            beside(row["memory"], paper.get("memory"), ".2f"),
            beside(row["ttfo"], paper.get("ttfo"), ",.1f"),
            f"{row['calls']:,}",
            f"{row['largest']:,}",
        )


def failures(rows: Rows) -> Iterator[str]:
    yield from head(
        "failure",
        "seconds",
        "published before",
        "encoded to complete",
        "most in flight",
        "repeated",
        "refused",
        "wrong",
    )
    for row in rows["failures"]:
        before = "" if row["published_before"] is None else f"{row['published_before']:,}"
        counts = (f"{row[name]:,}" for name in ("encoded_after", "in_flight", "repeated", "refused", "wrong"))
        yield line(row["name"], f"{row['seconds']:.2f}", before, *counts)


# Each with the experiments that it needs.
TABLES: dict[str, tuple[Callable[[Rows], Iterator[str]], tuple[str, ...]]] = {
    "workload": (workload, ()),
    "theorem": (theorem, ()),
    "calls": (calls, ("calls",)),
    "lemma": (lemma, ("scaling",)),
    "end_to_end": (end_to_end, ("end_to_end",)),
    "packing": (packing, ("packing",)),
    "bound": (bound, ("bound",)),
    "ablation": (ablation, ("ablation",)),
    "models": (models, ("models", "end_to_end")),
    "real_models": (real_models, ("real_models",)),
    "sigmas": (sigmas, ("packing",)),
    "profiles": (profiles, ("profiles",)),
    "thresholds": (thresholds, ("thresholds",)),
    "serialization": (serialization, ("serialization",)),
    "scaling": (scaling, ("scaling",)),
    "cost": (cost, ("end_to_end",)),
    "failures": (failures, ("failures",)),
    "decisions": (decisions, ()),
}


def _compared(
    rows: Sequence[Row], theirs: Mapping[str, published.Values], *columns: Column, heading: str = ""
) -> Iterator[str]:
    """A row for each run, and the paper's values of the same name behind its own."""
    yield from head(heading, *(title for title, _, _ in columns))
    for row in rows:
        paper = theirs.get(row["name"], {})
        cells = (beside(row[name], paper.get(name), form) for _, name, form in columns)
        yield line(row["name"], *cells)
