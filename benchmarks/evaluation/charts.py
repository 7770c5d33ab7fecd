"""The chart of the page, as SVG by matplotlib: the paper's figures with this machine's values
beside its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evaluation import published
from benchmarks.evaluation.tables import Rows

OURS, THEIRS = "#1f6feb", "#b0b8c4"
_SIZE = (8.0, 3.4)
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


def draw(rows: Rows, folder: Path) -> None:
    """Draw the chart of growing catalogs, if they were measured."""
    if not rows.get("scaling"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    titles = {
        "throughput": "texts/s at the paper's clock",
        "memory": "memory, GB",
        "ttfo": "first output, s",
    }
    with mpl.rc_context(STYLE):
        figure = Figure(_SIZE)
        panels: list[Axes] = np.ravel(np.asarray(figure.subplots(1, len(titles)))).tolist()
        for axes, (value, title) in zip(panels, titles.items(), strict=True):
            for name, mark in (("SURGE async", "o"), ("FSB 100K", "s")):
                ours = [
                    (row["texts"] / 1e6, row[value])
                    for row in rows["scaling"]
                    if row["name"] == name
                ]
                theirs = [
                    (float(size), values[value]) for size, values in published.SCALING[name].items()
                ]
                axes.plot(
                    *zip(*theirs, strict=True), f"{mark}-", color=THEIRS, label=f"{name}, paper"
                )
                axes.plot(*zip(*ours, strict=True), f"{mark}-", color=OURS, label=f"{name}, here")
            axes.set(xscale="log", xlabel="million texts", title=title)
            axes.set(**{"ylim": (0, 31_000)} if value == "throughput" else {"yscale": "log"})
        panels[0].legend(fontsize=7, loc="lower left")
        figure.tight_layout()
        figure.savefig(folder / "evaluation-scaling.svg", metadata={"Date": None})
