"""The chart of the page, as SVG by matplotlib: the paper's figures next to this machine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evaluation import published
from benchmarks.evaluation.tables import Rows

OURS = "#1f6feb"
THEIRS = "#b0b8c4"
STYLE: Any = {
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
_TITLES = {
    "throughput": "texts/s at the paper's clock",
    "memory": "memory, GB",
    "ttfo": "first output, s",
}


def draw(rows: Rows, folder: Path) -> None:
    """Draw the chart of growing catalogs, if they were measured."""
    if not rows.get("scaling"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure = Figure((8.0, 3.4))
        panels: Any = figure.subplots(1, len(_TITLES))
        for axes, value in zip(panels, _TITLES, strict=True):
            _draw_panel(axes, value, rows)
        panels[0].legend(fontsize=7, loc="lower left")
        figure.tight_layout()
        figure.savefig(folder / "evaluation-scaling.svg", metadata={"Date": None})


def _draw_panel(axes: Axes, value: str, rows: Rows) -> None:
    for name, mark in (("SURGE async", "o"), ("FSB 100K", "s")):
        theirs = published.SCALING[name]
        sizes = list(map(float, theirs))
        values = [row[value] for row in theirs.values()]
        axes.plot(sizes, values, f"{mark}-", color=THEIRS, label=f"{name}, paper")

        ours = [row for row in rows["scaling"] if row["name"] == name]
        sizes = [row["texts"] / 1e6 for row in ours]
        values = [row[value] for row in ours]
        axes.plot(sizes, values, f"{mark}-", color=OURS, label=f"{name}, here")
    axes.set(xscale="log", xlabel="million texts", title=_TITLES[value])
    if value == "throughput":
        axes.set_ylim(0, 31_000)
    else:
        axes.set_yscale("log")
