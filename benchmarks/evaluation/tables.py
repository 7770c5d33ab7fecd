"""The tables of the page: what was measured, with the paper's value in italics behind it.

Each function takes the document's rows by experiment and gives lines of Markdown; `TABLES` has all
of them with the experiments that they need. Some follow from the cost model: theorem 1 and the
decision table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.evaluation import published
from benchmarks.evaluation.scales import SEED
from benchmarks.synthetic import LOG_SIGMA, partition_sizes
from surge_dagster.engine.plan.cost_model import (
    CostConstants,
    recommend,
    small_share,
    speedup,
    superbatch_bytes,
    variation,
)

Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]
Column = tuple[str, str, str]  # heading, name of the value, format

_THROUGHPUT: Column = ("texts/s", "throughput", ",.0f")
_MEMORY: Column = ("memory, GB", "memory", ".2f")
_TTFO: Column = ("first output, s", "ttfo", ",.1f")
_FLUSHES = 100  # of the paper's runs, in its formula

# The model's constants, and what the paper predicts and measured.
THEOREM: dict[str, tuple[CostConstants, str, float]] = {
    "MiniLM, 4 workers": (published.MINILM, "0.93, 1.89", 1.92),
    "MiniLM, 2 workers": (published.MINILM_ON_TWO, "1.47", 1.469),
    "bge-base, 2 workers": (published.BGE_BASE, "0.603, 1.31", 1.29),
    "E5-large, 4 workers": (published.E5_LARGE, "0.34, 1.34", 1.32),
}


def head(*cells: str) -> Iterator[str]:
    """The two lines that begin a table."""
    yield line(*cells)
    yield line(*("---" for _ in cells))


def line(*cells: str) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


def theorem(rows: Rows) -> Iterator[str]:
    """Section 4.1: predictions of the model, and what simulated runs gave."""
    runs = {
        "MiniLM, 4 workers": rows.get("end_to_end", ()),
        "MiniLM, 2 workers": _group(rows, "packing", "1.72"),
        "bge-base, 2 workers": _group(rows, "models", "bge-base"),
        "E5-large, 4 workers": _group(rows, "models", "E5-large"),
    }
    yield from head(
        "",
        "alpha",
        "predicted",
        "*paper: alpha, predicted*",
        "*measured*",
        "calls only, here",
        "run here",
    )
    for name, (costs, theirs, gain) in THEOREM.items():
        alpha = costs.alpha(published.PARTITIONS, published.TEXTS)
        predicted = speedup(alpha, _FLUSHES, published.PARTITIONS)
        ours = {row["name"]: row for row in runs[name]}
        measured = ("-", "-")
        if ours:
            surge, pbp = ours["SURGE async"], ours["PBP"]
            measured = tuple(f"{surge[key] / pbp[key]:.2f}" for key in ("encoding", "throughput"))
        yield line(
            name, f"{alpha:.3f}", f"{predicted:.2f}", f"*{theirs}*", f"*{gain:g}*", *measured
        )


def calls(rows: Rows) -> Iterator[str]:
    """What a call costs, and what SuperBatches would gain on the paper's workload with it."""
    yield from head("pool", "c_ipc, ms", "95 % interval", "gain of SuperBatches")
    costs = [
        (row["name"], row["milliseconds"], f"{row['low']:.2f} to {row['high']:.2f}")
        for row in rows["calls"]
    ]
    for name, milliseconds, interval in (
        *costs,
        ("*paper*", 1_000 * published.MINILM.call_seconds, ""),
    ):
        model = replace(published.MINILM, call_seconds=max(0.0, milliseconds / 1_000))
        alpha = model.alpha(published.PARTITIONS, published.TEXTS)
        yield line(
            name,
            f"{milliseconds:.2f}",
            interval,
            f"{speedup(alpha, _FLUSHES, published.PARTITIONS):.2f}",
        )


def end_to_end(rows: Rows) -> Iterator[str]:
    priced = [row | {"price": _price(row)} for row in rows["end_to_end"]]
    theirs = {
        name: {**values, "price": _price(values)} for name, values in published.END_TO_END.items()
    }
    yield from _compared(
        priced,
        theirs,
        _THROUGHPUT,
        _MEMORY,
        _TTFO,
        ("exposed I/O, s", "exposed", ".2f"),
        ("after the last call, s", "tail", ".2f"),
        ("$ per million texts", "price", ".2f"),
    )


def _price(values: Mapping[str, float]) -> float:
    """Dollars per million texts on the paper's node (section 5.11)."""
    return published.PRICE_PER_HOUR / 3_600 * 1e6 / values["throughput"]


def packing(rows: Rows) -> Iterator[str]:
    yield from _compared(
        _group(rows, "packing", "1.72"), published.PACKING, _THROUGHPUT, _MEMORY, _TTFO
    )


def bound(rows: Rows) -> Iterator[str]:
    yield from _compared(
        rows["bound"], {}, ("largest call", "largest", ",d"), ("B_max", "b_max", ",d")
    )


def ablation(rows: Rows) -> Iterator[str]:
    full, *others = rows["ablation"]
    changed = [
        full,
        *(row | {"change": row["throughput"] / full["throughput"] - 1} for row in others),
    ]
    change: Column = ("change", "change", "+.1%")
    yield from _compared(changed, published.ABLATION, _THROUGHPUT, change, _MEMORY, _TTFO)


def models(rows: Rows) -> Iterator[str]:
    pbp = {row["group"]: row["throughput"] for row in rows["models"] if row["name"] == "PBP"}
    named = [
        row
        | {"name": f"{row['group']} {row['name']}", "gain": row["throughput"] / pbp[row["group"]]}
        for row in rows["models"]
    ]
    theirs = {
        name: {
            **values,
            "gain": values["throughput"] / published.MODELS[f"{name.split()[0]} PBP"]["throughput"],
        }
        for name, values in published.MODELS.items()
    }
    yield from _compared(named, theirs, _THROUGHPUT, _MEMORY, _TTFO, ("gain", "gain", ".2f"))


def real_models(rows: Rows) -> Iterator[str]:
    named = [row | {"name": f"{row['group']}: {row['name']}"} for row in rows["real_models"]]
    columns = (("texts", "texts", ",d"), _THROUGHPUT, ("first output, s", "ttfo", ".2f"))
    yield from _compared(named, {}, *columns)


def sigmas(rows: Rows) -> Iterator[str]:
    compared = []
    for sigma in published.SIGMAS:
        ours = {row["name"]: row for row in _group(rows, "packing", sigma)}
        surge, pbp = ours["SURGE async"], ours["PBP"]["throughput"]
        cv = variation(partition_sizes(surge["texts"], surge["partitions"], float(sigma), SEED))
        compared.append(
            surge | {"name": sigma, "cv": cv, "pbp": pbp, "speedup": surge["throughput"] / pbp}
        )
    columns = (("CV", "cv", ".2f"), ("PBP", "pbp", ",.0f"), ("SURGE", "throughput", ",.0f"))
    gain: Column = ("gain", "speedup", ".2f")
    yield from _compared(compared, published.SIGMAS, *columns, gain, _MEMORY, heading="sigma")


def profiles(rows: Rows) -> Iterator[str]:
    compared = []
    for profile in published.PROFILES:
        ours = {row["name"]: row for row in _group(rows, "profiles", profile)}
        sync, surge = ours["sync"], ours["async"]
        gain = {"gain": surge["throughput"] / sync["throughput"] - 1}
        speeds = {"name": profile, "sync": sync["throughput"], "async": surge["throughput"]}
        compared.append(
            speeds | gain | {"exposed_sync": sync["exposed"], "exposed": surge["exposed"]}
        )
    columns = (("sync", "sync", ",.0f"), ("async", "async", ",.0f"), ("gain", "gain", "+.1%"))
    exposed = (("exposed I/O, s: sync", "exposed_sync", ".2f"), ("async", "exposed", ".2f"))
    yield from _compared(compared, published.PROFILES, *columns, *exposed, heading="store")


def thresholds(rows: Rows) -> Iterator[str]:
    yield from _compared(
        rows["thresholds"], published.THRESHOLDS, _THROUGHPUT, _TTFO, _MEMORY, heading="B_min"
    )


def serialization(rows: Rows) -> Iterator[str]:
    gained = [
        row | {"name": f"{row['rows']:,}", "gain": row["naive_seconds"] / row["seconds"]}
        for row in rows["serialization"]
    ]
    theirs = {
        name: {**values, "gain": values["naive_seconds"] / values["seconds"]}
        for name, values in published.SERIALIZATION.items()
    }
    seconds = (
        ("naive, s", "naive_seconds", ",.2f"),
        ("engine, s", "seconds", ",.2f"),
        ("gain", "gain", ".1f"),
    )
    memory = (("naive, MB", "naive_mb", ",.0f"), ("engine, MB", "mb", ",.0f"))
    yield from _compared(gained, theirs, *seconds, *memory, heading="rows")


def scaling(rows: Rows) -> Iterator[str]:
    named, theirs = [], {}
    for row in rows["scaling"]:
        name, millions = f"{row['texts']:,}: {row['name']}", f"{row['texts'] / 1e6:g}"
        bound = (
            superbatch_bytes(row["largest"], 47, 384) / 1e9
            if row["name"].startswith("SURGE")
            else None
        )
        named.append(row | {"name": name, "bound": bound})
        theirs[name] = published.SCALING[row["name"]].get(millions, {})
    columns = (
        _THROUGHPUT,
        ("encode calls", "encoding", ",.0f"),
        _MEMORY,
        ("M(S), GB", "bound", ".2f"),
        _TTFO,
    )
    yield from _compared(named, theirs, *columns, heading="texts")


def failures(rows: Rows) -> Iterator[str]:
    columns = ("published_before", "encoded_after", "in_flight", "repeated", "refused", "wrong")
    headings = ("published before", "encoded to complete", "most in flight", *columns[3:])
    given = [(heading, name, ",d") for heading, name in zip(headings, columns, strict=True)]
    yield from _compared(rows["failures"], {}, *given, heading="failure")


def decisions(rows: Rows) -> Iterator[str]:
    """Table 11 on the paper's six workloads, from their own constants and sizes."""
    yield from head("workload", "phi", "CV", "verdict")
    for sigma in map(float, published.SIGMAS):
        sizes = partition_sizes(published.TEXTS, published.PARTITIONS, sigma)
        for name, (costs, _, _) in THEOREM.items():
            if sigma == LOG_SIGMA or name == "MiniLM, 2 workers":
                phi, cv = small_share(sizes, costs.break_even_texts), variation(sizes)
                yield line(f"{name}, sigma {sigma}", f"{phi:.2f}", f"{cv:.2f}", recommend(phi, cv))


# Each with the experiments that it needs.
TABLES: dict[str, tuple[Callable[[Rows], Iterator[str]], tuple[str, ...]]] = {
    "theorem": (theorem, ()),
    "decisions": (decisions, ()),
    "sigmas": (sigmas, ("packing",)),
    **{
        table.__name__: (table, (table.__name__,))
        for table in (
            *(
                calls,
                end_to_end,
                packing,
                bound,
                ablation,
                models,
                real_models,
                profiles,
                thresholds,
            ),
            *(serialization, scaling, failures),
        )
    },
}


def _group(rows: Rows, experiment: str, group: str) -> list[Row]:
    return [row for row in rows.get(experiment, ()) if row["group"] == group]


def _compared(
    rows: Iterable[Row], theirs: Mapping[str, published.Values], *columns: Column, heading: str = ""
) -> Iterator[str]:
    """A row for each run, and the paper's values of the same name behind its own."""
    yield from head(heading, *(title for title, _, _ in columns))
    for row in rows:
        paper = theirs.get(row["name"], {})
        yield line(
            row["name"],
            *(_with_paper(row.get(name), paper.get(name), form) for _, name, form in columns),
        )


def _with_paper(ours: float | None, theirs: float | None, form: str) -> str:
    """Our value, with the paper's in italics behind it where it has one."""
    if ours is None:
        return ""
    return (
        format(ours, form) if theirs is None else f"{format(ours, form)} (*{format(theirs, form)}*)"
    )
