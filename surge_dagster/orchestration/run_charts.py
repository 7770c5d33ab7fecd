"""Charts of a run: when each stage was at work, how large the partitions were, how fast it went."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import dagster as dg

from surge_dagster.engine.cost_model import CALL_SECONDS, CostConstants
from surge_dagster.engine.report import RunReport
from surge_dagster.engine.support.timeline import Span, Timeline
from surge_dagster.orchestration.run_findings import RunFindings
from surge_dagster.orchestration.svg import GREY, LEFT, RIGHT, Svg, short, ticks

_LANES = (("encode", "#2f6f9f"), ("serialize", "#c98a3a"), ("upload", "#5b9a68"))
_LANE, _TOP, _FAINTEST = 38, 36, 0.25
_BLUE, _PALE, _RED, _DARK = "#2f6f9f", "#a9c6dc", "#b5403a", "#444"
_LABEL = 90  # the room that a mark's label takes
_PLOT_TOP, _PLOT_BOTTOM, _HEIGHT = 52, 210, 250


def run_charts(report: RunReport, findings: RunFindings) -> dict[str, dg.MarkdownMetadataValue]:
    """The charts by name, as metadata; none of a run that encoded nothing."""
    charts: dict[str, dg.MarkdownMetadataValue] = {}
    if findings.timeline.entries:
        charts["timeline"] = timeline_chart(findings.timeline)
        charts["throughput"] = throughput_chart(findings.timeline)
    if findings.sizes and report.texts_encoded and report.encode_seconds > 0:
        rate = report.texts_encoded / report.encode_seconds
        break_even = CostConstants(CALL_SECONDS, report.workers / rate, report.workers).break_even_texts
        charts["partition_sizes"] = sizes_chart(findings.sizes, break_even, report.b_min)
    return charts


def timeline_chart(timeline: Timeline) -> dg.MarkdownMetadataValue:
    """Lanes over the run's time; a bar is a SuperBatch, or several, and paler where the stage was not always busy."""
    spans = [[span for span in (entry.encode, entry.serialize, entry.upload) if span] for entry in timeline.entries]
    last = max((span.ended for row in spans for span in row), default=0.0) or 1.0
    bars = "a bar is a SuperBatch" if timeline.per_entry == 1 else f"a bar is {timeline.per_entry:,} SuperBatches"
    chart = Svg(f"When each stage was at work ({bars})", _TOP + 3 * _LANE + 30)

    def place(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / last

    bottom = _TOP + 3 * _LANE
    for tick in ticks(last):
        chart.line(place(tick), _TOP, place(tick), bottom)
        chart.text(place(tick), bottom + 16, f"{tick:,.6g} s", anchor="middle", fill=GREY)
    for row, (lane, colour) in enumerate(_LANES):
        top = _TOP + row * _LANE
        chart.text(10, top + 24, lane)
        for entry in timeline.entries:
            span: Span | None = getattr(entry, lane)
            if span is not None:
                share = min(1.0, span.busy_seconds / max(span.ended - span.begun, 1e-9))
                width = place(span.ended) - place(span.begun) - 0.5  # the gap tells neighbours apart
                chart.box(place(span.begun), top + 6, width, _LANE - 12, colour, max(_FAINTEST, share))
    return chart.metadata()


def throughput_chart(timeline: Timeline) -> dg.MarkdownMetadataValue:
    """Texts per second of each encode call, and of all together."""
    rates = [(entry.superbatches, _rate(entry.texts, entry.encode_seconds)) for entry in timeline.entries]
    mean = _rate(sum(e.texts for e in timeline.entries), sum(e.encode_seconds for e in timeline.entries))
    most = 1.1 * max(max(rate for _, rate in rates), mean) or 1.0
    count = sum(superbatches for superbatches, _ in rates)
    chart = Svg("Texts per second of each encode call", _HEIGHT)

    def level(rate: float) -> float:
        return _PLOT_BOTTOM - (_PLOT_BOTTOM - _PLOT_TOP) * rate / most

    for tick in ticks(most):
        chart.line(LEFT, level(tick), RIGHT, level(tick))
        chart.text(LEFT - 8, level(tick) + 4, short(tick), anchor="end", fill=GREY)
    before, points = 0, []
    for superbatches, rate in rates:
        points.append((LEFT + (RIGHT - LEFT) * (before + superbatches / 2) / count, level(rate)))
        before += superbatches
    for (x1, y1), (x2, y2) in pairwise(points):
        chart.line(x1, y1, x2, y2, stroke=_BLUE)
    for x, y in points:
        chart.dot(x, y, _BLUE)
    chart.line(LEFT, level(mean), RIGHT, level(mean), stroke=_RED, dashed=True)
    chart.text(RIGHT, 40, f"all calls together: {mean:,.0f} texts/s (dashed)", anchor="end", fill=_RED)
    chart.text(LEFT, _PLOT_BOTTOM + 18, "first SuperBatch", fill=GREY)
    chart.text(RIGHT, _PLOT_BOTTOM + 18, f"last of {count:,}", anchor="end", fill=GREY)
    return chart.metadata()


def sizes_chart(sizes: Counter[int], break_even: float, b_min: int) -> dg.MarkdownMetadataValue:
    """How many partitions have how many texts, with n* and B_min.

    Args:
        sizes: partitions by the bits that their number of texts takes.
        break_even: n*, below which a partition alone would spend more on its encode call than on its texts.
    """
    marks = [(f"n* = {short(max(break_even, 0))}", break_even, _RED), (f"B_min = {short(b_min)}", b_min, _DARK)]
    first = min([*sizes, *(int(_bits(value)) for _, value, _ in marks)])
    bins = max([*sizes, *(int(_bits(value)) for _, value, _ in marks)]) + 1 - first
    most = max(sizes.values())
    width = (RIGHT - LEFT) / bins
    chart = Svg(f"Encoded partitions by their number of texts ({sum(sizes.values()):,} in all)", _HEIGHT)
    for tick in ticks(most):
        y = _PLOT_BOTTOM - (_PLOT_BOTTOM - _PLOT_TOP) * tick / most
        chart.line(LEFT, y, RIGHT, y)
        if tick == int(tick):
            chart.text(LEFT - 8, y + 4, short(tick), anchor="end", fill=GREY)
    for number in range(bins):
        bits, x = first + number, LEFT + width * number
        height = (_PLOT_BOTTOM - _PLOT_TOP) * sizes[bits] / most
        if sizes[bits]:
            chart.box(x + 1, _PLOT_BOTTOM - height, width - 2, height, _PALE)
        chart.text(x, _PLOT_BOTTOM + 16, _power(bits), anchor="middle", fill=GREY)
    lines = [(LEFT + width * (_bits(value) - first), label, colour) for label, value, colour in marks]
    for x, _, colour in lines:
        chart.line(x, _PLOT_TOP - 6, x, _PLOT_BOTTOM, stroke=colour, dashed=True, width=2)
    (left, left_label, left_colour), (right, right_label, right_colour) = sorted(lines)
    right = min(right + 4, RIGHT - _LABEL)
    chart.text(min(left - 4, right - 8), 40, left_label, anchor="end", fill=left_colour)
    chart.text(right, 40, right_label, fill=right_colour)
    return chart.metadata()


def _bits(texts: float) -> float:
    """Where a number of texts lies on the axis of bits."""
    return math.log2(texts) + 1 if texts >= 1 else max(0.0, texts)


def _power(bits: int) -> str:
    """The least number that takes so many bits, for an axis: 0, 1, 512, 4Ki, 1Mi."""
    least = 1 << bits - 1 if bits else 0
    unit = max(0, bits - 1) // 10
    return f"{least >> 10 * unit}{('', 'Ki', 'Mi', 'Gi', 'Ti')[unit]}"


def _rate(texts: int, seconds: float) -> float:
    return texts / seconds if seconds > 0 else 0.0
