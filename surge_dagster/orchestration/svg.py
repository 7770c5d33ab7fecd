"""Just enough SVG for a chart in an event's metadata, which Dagster's UI shows as an image.

A plotting library would draw the same in a third of a second per chart, after seconds of importing it, at the end of
every run; a run of a few small partitions takes less.
"""

from __future__ import annotations

import base64
import math
from html import escape

import dagster as dg

WIDTH = 760
LEFT, RIGHT = 90, 740  # of the plotted area
GREY = "#8a8a8a"


class Svg:
    """A document that is drawn into.

    Args:
        title: above everything.
        height: in pixels; the width is `WIDTH`.
    """

    def __init__(self, title: str, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
            f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        ]
        self.text(10, 20, title, size=14)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, fill: str = "#222") -> None:
        """Write at the baseline."""
        self._parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        """Fill a rectangle; what is thinner than a pixel is still seen."""
        shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(1.0, width):.1f}" height="{height:.0f}" fill="{fill}"{shade}/>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "#ddd", dashed: bool = False, width: int = 1
    ) -> None:
        """Draw a line."""
        style = f' stroke-width="{width}"' if width != 1 else ""
        style += ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{style}/>')

    def dot(self, x: float, y: float, fill: str) -> None:
        """Draw a point."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}"/>')

    def metadata(self) -> dg.MarkdownMetadataValue:
        """The document as an image within markdown."""
        document = base64.b64encode("".join([*self._parts, "</svg>"]).encode()).decode()
        return dg.MetadataValue.md(f"![chart](data:image/svg+xml;base64,{document})")


def ticks(most: float) -> list[float]:
    """Four to ten round values from 0 up to `most`."""
    if most <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(most))
    step *= next(part for part in (1, 0.5, 0.2) if most / (step * part) >= 4)
    return [step * count for count in range(int(most / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 0.05, 250, 4k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
