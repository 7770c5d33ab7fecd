"""Charts of a run as SVG images: when each stage worked, how large the partitions were, how fast it
encoded.

A plotting library would take seconds to import and a third of a second per chart, at the end of
every run; a run of a few small partitions takes less. Dagster's UI shows an image that stands in an
event's metadata as markdown.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise

import dagster as dg

from surge_dagster.cluster.machine_work import MachineWork
from surge_dagster.engine.plan.cost_model import CostConstants
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.timeline import Span
from surge_dagster.orchestration.timeline import Timeline

WIDTH, _HEIGHT = 760, 250
LEFT, RIGHT = 90, 740  # of the plotted area
_TOP, _BOTTOM = 52, 210
_LANES = (("encode", "#2f6f9f"), ("serialize", "#c98a3a"), ("upload", "#5b9a68"))
_LANE, _FAINTEST = 40, 0.25
_MACHINE, _MOST_MACHINES = 20, 40
_LABEL = 34  # the width of a label below an axis
_FEWEST = 4  # counts at the end of an axis, so that its lines are at whole numbers
_BLUE, _PALE, _RED, _DARK, _GREY = "#2f6f9f", "#a9c6dc", "#b5403a", "#444", "#8a8a8a"


def run_charts(
    report: RunReport,
    timeline: Timeline,
    sizes: Counter[int],
    machines: Mapping[str, MachineWork] | None = None,
) -> dict[str, dg.MarkdownMetadataValue]:
    """The charts by name, as metadata; none of a run that encoded nothing.

    Args:
        machines: of a run over a cluster, whose SuperBatches have no common time.
    """
    charts: dict[str, dg.MarkdownMetadataValue] = {}
    if timeline.entries:
        charts["timeline"] = (
            timeline_chart(timeline)
            if machines is None
            else machines_chart(list(machines.values()))
        )
        charts["throughput"] = throughput_chart(timeline)
    rate = report.costs.texts_per_second
    if sizes and rate is not None:
        break_even = CostConstants(
            report.call_seconds, report.workers / rate, report.workers
        ).break_even_texts
        charts["partition_sizes"] = sizes_chart(sizes, break_even, report.b_min)
    return charts


def timeline_chart(timeline: Timeline) -> dg.MarkdownMetadataValue:
    """Lanes over the run's time; a bar is a SuperBatch, or several, and paler where the stage was
    not always busy."""
    spans = [
        span
        for entry in timeline.entries
        for span in (entry.encode, entry.serialize, entry.upload)
        if span
    ]
    last = max((span.ended for span in spans), default=0.0) or 1.0
    bars = (
        "a bar is a SuperBatch"
        if timeline.per_entry == 1
        else f"a bar is {timeline.per_entry:,} SuperBatches"
    )
    chart = _Svg(f"When each stage was at work ({bars})")

    def place(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / last

    for tick in ticks(last):
        chart.line(place(tick), _TOP, place(tick), _BOTTOM)
        chart.text(place(tick), _BOTTOM + 18, f"{tick:,.6g} s", anchor="middle", fill=_GREY)
    for row, (lane, colour) in enumerate(_LANES):
        top = _TOP + row * _LANE
        chart.text(10, top + 24, lane)
        for entry in timeline.entries:
            span: Span | None = getattr(entry, lane)
            if span is not None:
                share = min(1.0, span.busy_seconds / max(span.ended - span.begun, 1e-9))
                width = place(span.ended) - place(span.begun) - 0.5  # the gap separates neighbours
                chart.box(
                    place(span.begun), top + 6, width, _LANE - 12, colour, max(_FAINTEST, share)
                )
    return chart.metadata()


def machines_chart(machines: Sequence[MachineWork]) -> dg.MarkdownMetadataValue:
    """A lane for each machine, with its address and throughput; a red line is where it was lost
    with a stretch."""
    shown = machines[:_MOST_MACHINES]
    last = max((span.ended for work in shown for span in work.spans), default=0.0) or 1.0
    some = "" if len(shown) == len(machines) else f" ({len(shown)} of {len(machines):,})"
    bottom = _TOP + _MACHINE * len(shown)
    chart = _Svg(
        f"When each machine was at work, and its texts/s{some}; red: it was lost", bottom + 40
    )

    def place(seconds: float) -> float:
        return 2 * LEFT + (RIGHT - 3 * LEFT) * min(seconds, last) / last

    for tick in ticks(last):
        chart.line(place(tick), _TOP, place(tick), bottom)
        chart.text(place(tick), bottom + 18, f"{tick:,.6g} s", anchor="middle", fill=_GREY)
    for row, work in enumerate(shown):
        top = _TOP + row * _MACHINE
        chart.text(10, top + 14, work.facts.host)
        chart.text(
            RIGHT, top + 14, f"{_rate(work.texts, work.seconds):,.0f}", anchor="end", fill=_GREY
        )
        for span in work.spans:
            chart.box(
                place(span.begun),
                top + 3,
                place(span.ended) - place(span.begun),
                _MACHINE - 6,
                _BLUE,
            )
        for seconds in work.lost_at:
            chart.line(place(seconds), top, place(seconds), top + _MACHINE, stroke=_RED, width=2)
    return chart.metadata()


def throughput_chart(timeline: Timeline) -> dg.MarkdownMetadataValue:
    """Texts per second of each encode call, and of all together."""
    entries = timeline.entries
    rates = [_rate(entry.texts, entry.encode_seconds) for entry in entries]
    mean = _rate(
        sum(entry.texts for entry in entries), sum(entry.encode_seconds for entry in entries)
    )
    most = 1.1 * max(*rates, mean) or 1.0
    ends = list(accumulate(entry.superbatches for entry in entries))
    chart = _Svg("Texts per second of each encode call")
    chart.vertical_axis(most)
    points = [
        (LEFT + (RIGHT - LEFT) * (end - entry.superbatches / 2) / ends[-1], _level(rate, most))
        for entry, end, rate in zip(entries, ends, rates, strict=True)
    ]
    for (x1, y1), (x2, y2) in pairwise(points):
        chart.line(x1, y1, x2, y2, stroke=_BLUE)
    for x, y in points:
        chart.dot(x, y, _BLUE)
    chart.line(LEFT, _level(mean, most), RIGHT, _level(mean, most), stroke=_RED, dashed=True)
    chart.text(
        RIGHT, 40, f"all calls together: {mean:,.0f} texts/s (dashed)", anchor="end", fill=_RED
    )
    chart.text(LEFT, _BOTTOM + 18, "first SuperBatch", fill=_GREY)
    chart.text(RIGHT, _BOTTOM + 18, f"last of {ends[-1]:,}", anchor="end", fill=_GREY)
    return chart.metadata()


def sizes_chart(sizes: Counter[int], break_even: float, b_min: int) -> dg.MarkdownMetadataValue:
    """How many partitions have how many texts, by the bits of these, with B_min and n*
    (`break_even`) from 1 on."""
    marks: list[tuple[str, float, str, str, float]] = [
        ("B_min", b_min, _DARK, "B_min: texts that a SuperBatch collects", 10)
    ]
    if break_even >= 1:
        marks.append(
            ("n*", break_even, _RED, "n*: a call costs more than encoding fewer texts", 290)
        )
    all_bits = [*sizes, *(int(_bits(mark[1])) for mark in marks)]
    first, last = min(all_bits), max(all_bits)
    most, width = 1.1 * max(_FEWEST, *sizes.values()), (RIGHT - LEFT) / (last + 1 - first)
    chart = _Svg(
        f"Partitions by their number of texts: {sum(sizes.values()):,} encoded in this run"
    )
    chart.vertical_axis(most)
    for bits in range(first, last + 2):
        x, top = LEFT + width * (bits - first), _level(sizes[bits], most)
        if sizes[bits]:
            chart.box(x + 1, top, width - 2, _BOTTOM - top, _PALE)
        if width > _LABEL or (bits - first) % 2 == 0:
            chart.text(x, _BOTTOM + 18, _power(bits), anchor="middle", fill=_GREY)
    # The larger value has the upper label and the smaller one has its label on the left, so that no
    # line crosses one.
    for row, (name, value, colour, meaning, legend) in enumerate(
        sorted(marks, key=lambda mark: -mark[1])
    ):
        x, y = LEFT + width * (_bits(value) - first), _TOP - 12 + 14 * row
        is_left = row > 0 or x > RIGHT - 100
        label = f"{name} = {_short(value)}"
        chart.line(x, y - 10, x, _BOTTOM, stroke=colour, dashed=True, width=2)
        chart.text(
            x + (-5 if is_left else 5), y, label, anchor="end" if is_left else "start", fill=colour
        )
        chart.text(legend, _BOTTOM + 36, meaning, fill=colour)
    chart.text(RIGHT, _BOTTOM + 36, "texts in a partition", anchor="end", fill=_GREY)
    return chart.metadata()


def runs_chart(runs: Sequence[tuple[int, int]]) -> dg.MarkdownMetadataValue:
    """Rows encoded and rows reused in each of the last runs, the oldest first, one on top of the
    other."""
    most, width = max(_FEWEST, *(1.1 * sum(rows) for rows in runs)), (RIGHT - LEFT) / len(runs)
    chart = _Svg(
        "Rows of this run and of those before it: encoded, or reused because their text did not change"
    )
    chart.vertical_axis(most)
    for place, (encoded, reused) in enumerate(runs):
        x, border, top = LEFT + width * place, _level(encoded, most), _level(encoded + reused, most)
        if reused:
            chart.box(x + 1, top, width - 2, border - top, _PALE)
        if encoded:
            chart.box(x + 1, border, width - 2, _BOTTOM - border, _BLUE)
    encoded, reused = runs[-1]
    chart.text(LEFT, 40, f"encoded (dark): {encoded:,} in this run", fill=_BLUE)
    chart.text(RIGHT, 40, f"reused (pale): {reused:,} in this run", anchor="end", fill=_GREY)
    if len(runs) > 1:
        chart.text(LEFT, _BOTTOM + 18, f"{counted(len(runs) - 1, 'run')} before", fill=_GREY)
    chart.text(RIGHT, _BOTTOM + 18, "this run", anchor="end", fill=_GREY)
    return chart.metadata()


def _bits(texts: float) -> float:
    return math.log2(texts) + 1 if texts >= 1 else max(0.0, texts)


def _power(bits: int) -> str:
    """The least number that takes so many bits, for an axis: 0, 1, 512, 4k (4,096), 1M."""
    least = 1 << bits - 1 if bits else 0
    unit = max(0, bits - 1) // 10
    return f"{least >> 10 * unit}{('', 'k', 'M', 'G', 'T')[unit]}"


def _rate(texts: int, seconds: float) -> float:
    return texts / seconds if seconds > 0 else 0.0


def _level(value: float, most: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * value / most


class _Svg:
    """A document that is drawn into, of the width that all charts have."""

    def __init__(self, title: str, height: int = _HEIGHT) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
            f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        ]
        self.text(10, 20, title, size=14)

    def vertical_axis(self, most: float) -> None:
        for tick in ticks(most):
            self.line(LEFT, _level(tick, most), RIGHT, _level(tick, most))
            self.text(LEFT - 8, _level(tick, most) + 4, _short(tick), anchor="end", fill=_GREY)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 12,
        fill: str = "#222",
    ) -> None:
        self._parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
            f"{escape(text)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0
    ) -> None:
        """Fill a rectangle; one that is too small to be seen grows, to the right and upwards."""
        bottom, height = y + height, max(2.0, height)
        self._parts.append(
            f'<rect x="{x:.1f}" y="{bottom - height:.0f}" width="{max(1.0, width):.1f}" height="{height:.0f}" '
            f'fill="{fill}" fill-opacity="{opacity:.2f}"/>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        stroke: str = "#ddd",
        dashed: bool = False,
        width: int = 1,
    ) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
            f'stroke-width="{width}"{dashes}/>'
        )

    def dot(self, x: float, y: float, fill: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}"/>')

    def metadata(self) -> dg.MarkdownMetadataValue:
        document = base64.b64encode("".join([*self._parts, "</svg>"]).encode()).decode()
        return dg.MetadataValue.md(f"![chart](data:image/svg+xml;base64,{document})")


def ticks(most: float) -> list[float]:
    """Four to ten round values from 0 up to `most`."""
    if most <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(most))
    step *= next(part for part in (1, 0.5, 0.2) if most / (step * part) >= 4)
    return [step * count for count in range(int(most / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """A number for an axis: 0.05, 250, 4k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
