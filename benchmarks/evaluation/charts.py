"""The charts of the page, as SVG by matplotlib: the paper's figures with this machine's values beside its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evaluation import published
from benchmarks.evaluation.page import CHARTS, are_there
from benchmarks.evaluation.theory import Rows
from surge_dagster.catalogs.synthetic import partition_sizes
from surge_dagster.engine.plan.cost_model import flushes_upper_bound

OURS, THEIRS, OTHER = "#1f6feb", "#b0b8c4", "#d9822b"
_SIZE = (8.0, 3.4)
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e8ec",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "surge-dagster",  # the same values give the same file
    "figure.facecolor": "white",
}


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Draw every chart whose experiments were measured; gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with mpl.rc_context(_STYLE):
        for name, (_, needed) in CHARTS.items():
            if are_there(rows, needed):
                figure = _DRAWN[name](rows)
                figure.tight_layout()
                drawn.append(folder / f"evaluation-{name}.svg")
                figure.savefig(drawn[-1], metadata={"Date": None})
    return drawn


def _sizes(rows: Rows) -> Figure:
    figure, [axes] = _axes(1)
    sizes, limit = partition_sizes(published.TEXTS, published.PARTITIONS), published.MINILM.break_even_texts
    axes.hist(sizes, bins=np.geomspace(1, sizes.max(), 60).tolist(), color=OURS)
    axes.axvline(limit, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"n* = {limit:,.0f}", (limit, axes.get_ylim()[1]), (4, -10), textcoords="offset points")
    axes.set(xscale="log", xlabel="texts of a partition", ylabel="partitions")
    return figure


def _throughput(rows: Rows) -> Figure:
    figure, [left, right] = _axes(2)
    found = [row for row in rows["end_to_end"] if row["name"] in published.END_TO_END]
    names = [row["name"] for row in found]
    _bars(
        left,
        names,
        here=[row["throughput"] for row in found],
        paper=[published.END_TO_END[name]["throughput"] for name in names],
    )
    left.set(ylabel="texts/s at the paper's clock", ylim=(0, 34_000))
    encoding = [row["encode_seconds"] / row["wall_seconds"] for row in found]
    writing = [(row["exposed"] + row["tail"]) / row["wall_seconds"] for row in found]
    places = np.arange(len(found))
    right.bar(places, encoding, 0.6, label="encode calls", color=OURS)
    right.bar(places, writing, 0.6, bottom=encoding, label="files, nothing encoded", color=OTHER)
    rest = [max(0.0, 1 - one - other) for one, other in zip(encoding, writing, strict=True)]
    right.bar(places, rest, 0.6, bottom=np.add(encoding, writing), label="other", color=THEIRS)
    right.set(ylabel="share of the wall time", ylim=(0, 1.25))
    right.set_xticks(places, names, rotation=30, ha="right")
    right.legend(ncols=3, loc="upper center", fontsize=7)
    return figure


def _profiles(rows: Rows) -> Figure:
    figure, axes = _axes(2)
    names = list(published.PROFILES)
    for one, way in zip(axes, ("sync", "async"), strict=True):
        ours = {row["group"]: row["throughput"] for row in rows["profiles"] if row["name"] == way}
        theirs = [published.PROFILES[name][way] for name in names]
        _bars(one, names, here=[ours[name] for name in names], paper=theirs)
        one.set(title=f"{way}hronous", ylabel="texts/s at the paper's clock", ylim=(0, 34_000))
    return figure


def _thresholds(rows: Rows) -> Figure:
    figure, [axes] = _axes(1)
    wanted = list(published.THRESHOLDS)
    costs = published.MINILM
    theory = [
        published.TEXTS / costs.seconds(flushes_upper_bound(published.TEXTS, b_min), published.TEXTS)
        for b_min in wanted
    ]
    axes.plot(wanted, [row["throughput"] for row in rows["thresholds"]], "o-", color=OURS, label="here")
    axes.plot(wanted, [one["throughput"] for one in published.THRESHOLDS.values()], "s-", color=THEIRS, label="paper")
    axes.plot(wanted, theory, "--", color="black", linewidth=1, label="theorem 1")
    axes.set(xscale="log", xlabel="B_min of the paper, texts", ylabel="texts/s at the paper's clock", ylim=(0, 31_000))
    axes.legend(loc="lower right")
    return figure


def _serialization(rows: Rows) -> Figure:
    figure, [axes] = _axes(1)
    found = rows["serialization"]
    for name, mark, label in (("naive_seconds", "o", "naive"), ("seconds", "s", "engine, or zero-copy")):
        axes.plot(
            [row["rows"] for row in found], [row[name] for row in found], f"{mark}-", color=OURS, label=f"{label}, here"
        )
        paper = [(size, one[name]) for size, one in published.SERIALIZATION.items()]
        axes.plot(*zip(*paper, strict=True), f"{mark}-", color=THEIRS, label=f"{label}, paper")
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="seconds")
    axes.legend(fontsize=7)
    return figure


def _scaling(rows: Rows) -> Figure:
    figure, axes = _axes(3)
    titles = {"throughput": "texts/s at the paper's clock", "memory": "memory, GB", "ttfo": "first output, s"}
    for one, (value, title) in zip(axes, titles.items(), strict=True):
        for name, mark in (("SURGE async", "o"), ("FSB 100K", "s")):
            ours = [(row["texts"] / 1e6, row[value]) for row in rows["scaling"] if row["name"] == name]
            theirs = [(size, both[name][value]) for size, both in published.SCALING.items()]
            one.plot(*zip(*theirs, strict=True), f"{mark}-", color=THEIRS, label=f"{name}, paper")
            if ours:
                one.plot(*zip(*ours, strict=True), f"{mark}-", color=OURS, label=f"{name}, here")
        one.set(xscale="log", xlabel="million texts", title=title)
        if value != "throughput":
            one.set(yscale="log")
        else:
            one.set(ylim=(0, 31_000))
    axes[0].legend(fontsize=7, loc="lower left")
    return figure


_DRAWN: dict[str, Callable[[Rows], Figure]] = {
    "sizes": _sizes,
    "throughput": _throughput,
    "profiles": _profiles,
    "thresholds": _thresholds,
    "serialization": _serialization,
    "scaling": _scaling,
}


def _axes(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(_SIZE)
    return figure, np.ravel(np.asarray(figure.subplots(1, count))).tolist()


def _bars(axes: Axes, names: Sequence[str], **sides: Sequence[float]) -> Any:
    """A pair of bars for each name."""
    places = np.arange(len(names))
    for index, (label, values) in enumerate(sides.items()):
        color = OURS if label == "here" else THEIRS
        axes.bar(places + 0.4 * (index - 0.5), values, 0.38, label=label, color=color)
    axes.set_xticks(places, names, rotation=30, ha="right")
    axes.legend(ncols=2, fontsize=7, loc="upper left")
