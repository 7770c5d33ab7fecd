"""The tables of the page: what was measured, with the paper's value in italics behind it.

Each function takes the document's rows by experiment and yields lines of Markdown; `TABLES` has all
of them with the experiments that they need. Theorem 1 follows from the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.evaluation import published
from benchmarks.evaluation.scales import SEED
from benchmarks.synthetic import partition_sizes
from surge_dagster.engine.plan.cost_model import CostConstants, speedup, variation

Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]
Column = tuple[str, str, str]  # heading, name of the value, format

_THROUGHPUT: Column = ("texts/s", "throughput", ",.0f")
_MEMORY: Column = ("memory, GB", "memory", ".2f")
_TTFO: Column = ("first output, s", "ttfo", ",.1f")
_FLUSHES = 100  # of the paper's runs, in its formula

# The model's constants, what the paper predicts and measured, and the experiment and group here.
_THEOREM: dict[str, tuple[CostConstants, str, float, str, str]] = {
    "MiniLM, 4 workers": (published.MINILM, "0.93, 1.89", 1.92, "end_to_end", ""),
    "MiniLM, 2 workers": (published.MINILM_ON_TWO, "1.47", 1.469, "packing", "1.72"),
    "bge-base, 2 workers": (
        published.BGE_BASE,
        "0.603, 1.31",
        1.29,
        "models",
        "bge-base",
    ),
    "E5-large, 4 workers": (published.E5_LARGE, "0.34, 1.34", 1.32, "models", "E5-large"),
}


def head(*cells: str) -> Iterator[str]:
    """Yield the two lines that begin a table."""
    yield line(*cells)
    yield line(*["---"] * len(cells))


def line(*cells: str) -> str:
    """Return a row."""
    return f"| {' | '.join(cells)} |"


def named(rows: Rows, experiment: str, group: str) -> dict[str, Row]:
    """Return the rows of a group by their names; none if it was not measured."""
    return {row["name"]: row for row in rows.get(experiment, ()) if row["group"] == group}


def theorem(rows: Rows) -> Iterator[str]:
    """Yield section 4.1: predictions of the model, and what simulated runs gave."""
    headings = ("*paper: alpha, predicted*", "*measured*", "calls only, here", "run here")
    yield from head("", "alpha", "predicted", *headings)
    for name, (costs, theirs, gain, experiment, group) in _THEOREM.items():
        alpha = costs.alpha(published.PARTITIONS, published.TEXTS)
        cells = [
            name,
            f"{alpha:.3f}",
            f"{_speedup(costs):.2f}",
            f"*{theirs}*",
            f"*{gain:g}*",
        ]
        ours = named(rows, experiment, group)
        for key in ("encoding", "throughput"):
            cells.append("-" if not ours else f"{ours['SURGE async'][key] / ours['PBP'][key]:.2f}")
        yield line(*cells)


def _speedup(costs: CostConstants) -> float:
    """Return what SuperBatches gain on the paper's workload."""
    alpha = costs.alpha(published.PARTITIONS, published.TEXTS)
    return speedup(alpha, _FLUSHES, published.PARTITIONS)


def calls(rows: Rows) -> Iterator[str]:
    """Yield what a call costs, and what SuperBatches would gain on the paper's workload with it."""
    yield from head("pool", "c_ipc, ms", "95 % interval", "gain of SuperBatches")
    for row in rows["calls"]:
        milliseconds = row["milliseconds"]
        costs = replace(published.MINILM, call_seconds=max(0.0, milliseconds / 1_000))
        interval = f"{row['low']:.2f} to {row['high']:.2f}"
        yield line(row["name"], f"{milliseconds:.2f}", interval, f"{_speedup(costs):.2f}")
    theirs = 1_000 * published.MINILM.call_seconds
    yield line("*paper*", f"{theirs:.2f}", "", f"{_speedup(published.MINILM):.2f}")


def end_to_end(rows: Rows) -> Iterator[str]:
    exposed: Column = ("exposed I/O, s", "exposed", ".2f")
    columns = (_THROUGHPUT, _MEMORY, _TTFO, exposed)
    yield from _compared(rows["end_to_end"], published.END_TO_END, *columns)


def packing(rows: Rows) -> Iterator[str]:
    ours = named(rows, "packing", "1.72").values()
    yield from _compared(ours, published.PACKING, _THROUGHPUT, _TTFO)


def ablation(rows: Rows) -> Iterator[str]:
    full, *others = rows["ablation"]
    ours = [full]
    for row in others:
        ours.append(row | {"change": row["throughput"] / full["throughput"] - 1})
    change: Column = ("change", "change", "+.1%")
    yield from _compared(ours, published.ABLATION, _THROUGHPUT, change, _MEMORY)


def models(rows: Rows) -> Iterator[str]:
    ours = [row | {"name": f"{row['group']} {row['name']}"} for row in rows["models"]]
    yield from _compared(ours, published.MODELS, _THROUGHPUT, _TTFO)


def real_models(rows: Rows) -> Iterator[str]:
    """Yield a row per way to run, with the texts per second of each model."""
    ways: dict[str, Row] = {}
    for row in rows["real_models"]:
        name, library, _ = row["name"].partition(", sentence-transformers")
        way = ways.setdefault(name, {"name": name})
        way[row["group"] + library] = row["throughput"]
    encoders = ("minilm", "minilm, sentence-transformers", "bge-base", "e5-large")
    yield from _compared(ways.values(), {}, *[(name, name, ",.0f") for name in encoders])


def sigmas(rows: Rows) -> Iterator[str]:
    ours = []
    for sigma in published.SIGMAS:
        runs = named(rows, "packing", sigma)
        surge = runs["SURGE async"]
        pbp = runs["PBP"]["throughput"]
        sizes = partition_sizes(surge["texts"], surge["partitions"], float(sigma), SEED)
        gain = surge["throughput"] / pbp
        ours.append(surge | {"name": sigma, "cv": variation(sizes), "pbp": pbp, "speedup": gain})
    columns = (
        ("CV", "cv", ".2f"),
        ("PBP", "pbp", ",.0f"),
        ("SURGE", "throughput", ",.0f"),
        ("gain", "speedup", ".2f"),
    )
    yield from _compared(ours, published.SIGMAS, *columns, heading="sigma")


def profiles(rows: Rows) -> Iterator[str]:
    ours = []
    for profile in published.PROFILES:
        runs = named(rows, "profiles", profile)
        sync = runs["sync"]["throughput"]
        surge = runs["async"]["throughput"]
        gain = surge / sync - 1
        ours.append({"name": profile, "sync": sync, "async": surge, "gain": gain})
    columns = (("sync", "sync", ",.0f"), ("async", "async", ",.0f"), ("gain", "gain", "+.1%"))
    yield from _compared(ours, published.PROFILES, *columns, heading="store")


def thresholds(rows: Rows) -> Iterator[str]:
    columns = (_THROUGHPUT, _TTFO)
    yield from _compared(rows["thresholds"], published.THRESHOLDS, *columns, heading="B_min")


def serialization(rows: Rows) -> Iterator[str]:
    def gained(name: str, values: Mapping[str, Any]) -> Row:
        return {
            **values,
            "name": name,
            "gain": values["naive_seconds"] / values["seconds"],
        }

    ours = [gained(f"{row['rows']:,}", row) for row in rows["serialization"]]
    theirs = {name: gained(name, values) for name, values in published.SERIALIZATION.items()}
    columns = (
        ("naive, s", "naive_seconds", ",.2f"),
        ("engine, s", "seconds", ",.2f"),
        ("gain", "gain", ".1f"),
    )
    yield from _compared(ours, theirs, *columns, heading="rows")


def scaling(rows: Rows) -> Iterator[str]:
    ours = []
    theirs = {}
    for row in rows["scaling"]:
        name = f"{row['texts']:,}: {row['name']}"
        ours.append(row | {"name": name})
        if row["name"].startswith("SURGE"):
            ours[-1]["bound"] = row["largest"] * (47 + 4 * 384) / 1e9  # lemma 3
        theirs[name] = published.SCALING[row["name"]].get(f"{row['texts'] / 1e6:g}", {})
    columns = (
        _THROUGHPUT,
        ("encode calls", "encoding", ",.0f"),
        _MEMORY,
        ("M(S), GB", "bound", ".2f"),
        _TTFO,
    )
    yield from _compared(ours, theirs, *columns, heading="texts")


def failures(rows: Rows) -> Iterator[str]:
    columns = (
        ("published before", "published_before", ",d"),
        ("encoded to complete", "encoded_after", ",d"),
        ("most in flight", "in_flight", ",d"),
        ("repeated", "repeated", ",d"),
        ("refused", "refused", ",d"),
        ("wrong", "wrong", ",d"),
    )
    yield from _compared(rows["failures"], {}, *columns, heading="failure")


_OF_EXPERIMENTS = (
    calls,
    end_to_end,
    packing,
    ablation,
    models,
    real_models,
    profiles,
    thresholds,
    serialization,
    scaling,
    failures,
)
# Each with the experiments that it needs.
TABLES: dict[str, tuple[Callable[[Rows], Iterator[str]], tuple[str, ...]]] = {
    "theorem": (theorem, ()),
    "sigmas": (sigmas, ("packing",)),
    **{table.__name__: (table, (table.__name__,)) for table in _OF_EXPERIMENTS},
}


def _compared(
    rows: Iterable[Row],
    theirs: Mapping[str, Mapping[str, Any]],
    *columns: Column,
    heading: str = "",
) -> Iterator[str]:
    """Yield a row for each run, with the paper's values of the same name behind its own."""
    yield from head(heading, *[title for title, _, _ in columns])
    for row in rows:
        paper = theirs.get(row["name"], {})
        cells = [row["name"]]
        for _, name, form in columns:
            ours = row.get(name)
            cell = "" if ours is None else format(ours, form)
            if ours is not None and name in paper:
                cell += f" (*{format(paper[name], form)}*)"
            cells.append(cell)
        yield line(*cells)
