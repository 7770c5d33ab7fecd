"""The charts of a run: they show what the run did, Dagster can display them, and they stay small."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
from collections import Counter

import dagster as dg
import pytest

from surge_dagster.cluster.machine import MachineFacts
from surge_dagster.cluster.machine_work import MachineWork
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.support.timeline import Span
from surge_dagster.orchestration.run_charts import (
    LEFT,
    RIGHT,
    run_charts,
    runs_chart,
    sizes_chart,
    throughput_chart,
    ticks,
    timeline_chart,
)
from surge_dagster.orchestration.timeline import Entry, Timeline
from tests.dagster.conftest import Workbench

_SVG = "{http://www.w3.org/2000/svg}"
_LARGEST = 60_000


def drawn(chart: dg.MarkdownMetadataValue) -> ET.Element:
    """What Dagster's UI is given to show: an image of its own, nothing that would have to be
    fetched."""
    assert len(chart.value) < _LARGEST
    head, document = chart.value.removesuffix(")").split(";base64,")
    assert head == "![chart](data:image/svg+xml"
    return ET.fromstring(base64.b64decode(document))


def words(svg: ET.Element) -> str:
    return " ".join(text.text or "" for text in svg.iter(f"{_SVG}text"))


def bars(svg: ET.Element) -> list[tuple[float, float, str]]:
    """Left edge, width and colour of each bar."""
    found = [box for box in svg.iter(f"{_SVG}rect") if box.get("fill") != "#fff"]
    return [
        (float(box.get("x", 0)), float(box.get("width", 0)), box.get("fill", "")) for box in found
    ]


def timeline_of(count: int) -> Timeline:
    """Encode calls of a second each; the publishing of each takes half of the next."""
    timeline = Timeline()
    for number in range(count):
        end = number + 1.0
        spans = (
            Span(number, end, 1.0),
            Span(end, end + 0.25, 0.25),
            Span(end + 0.25, end + 0.5, 0.1),
        )
        timeline.add(Entry(1, 1000 + number, 1.0, *spans))
    return timeline


def test_the_timeline_has_a_bar_for_each_stage_of_each_superbatch_where_it_was_at_work() -> None:
    found = bars(drawn(timeline_chart(timeline_of(3))))
    assert len(found) == 9 and len({colour for _, _, colour in found}) == 3
    second = (RIGHT - LEFT) / 3.5  # the last upload ends after 3.5 s
    lefts = [left for left, _, colour in found if colour == found[0][2]]
    assert lefts == pytest.approx([LEFT, LEFT + second, LEFT + 2 * second], abs=0.1)
    assert [width for _, width, _ in found][:3] == pytest.approx([second - 0.5] * 3, abs=0.1)
    assert found[3][0] == pytest.approx(LEFT + second, abs=0.1), (
        "serialization begins when encoding has ended"
    )


def test_charts_of_twenty_thousand_superbatches_stay_small_and_within_their_frame() -> None:
    timeline = timeline_of(20_000)
    svg = drawn(timeline_chart(timeline))
    assert "a bar is 256 SuperBatches" in words(svg)
    assert all(left >= LEFT and left + width <= RIGHT + 1 for left, width, _ in bars(svg))
    assert "last of 20,000" in words(drawn(throughput_chart(timeline)))


def test_the_throughput_has_a_point_for_each_superbatch_higher_where_it_was_faster() -> None:
    svg = drawn(throughput_chart(timeline_of(3)))
    heights = [float(point.get("cy", 0)) for point in svg.iter(f"{_SVG}circle")]
    assert len(heights) == 3 and heights[0] > heights[1] > heights[2]
    assert "all calls together: 1,001 texts/s" in words(svg)


def marks(svg: ET.Element) -> dict[str, tuple[float, float]]:
    """Left edges of the dashed lines and of their labels, each by the text of the label at its
    upper end."""
    found: dict[str, tuple[float, float]] = {}
    for line in (line for line in svg.iter(f"{_SVG}line") if line.get("stroke-dasharray")):
        x, y = float(line.get("x1", 0)), float(line.get("y1", 0)) + 10
        labels = [
            text for text in svg.iter(f"{_SVG}text") if text.get("fill") == line.get("stroke")
        ]
        [label] = [text for text in labels if abs(float(text.get("y", 0)) - y) < 1]
        found[label.text or ""] = x, float(label.get("x", 0))
    return found


def test_the_histogram_marks_n_star_and_b_min_where_they_lie_among_the_sizes() -> None:
    svg = drawn(sizes_chart(Counter({3: 10, 4: 5, 6: 1}), break_even=8, b_min=32))
    found = bars(svg)
    assert len(found) == 3 and ": 16 encoded in this run" in words(svg)
    n_star, b_min = (marks(svg)[name][0] for name in ("n* = 8", "B_min = 32"))
    assert n_star == pytest.approx(found[1][0] - 1, abs=0.2), "sizes of 8 to 15 begin at n*"
    assert b_min == pytest.approx(found[2][0] - 1, abs=0.2), "sizes of 32 to 63 begin at B_min"


@pytest.mark.parametrize(
    ("n_star", "b_min"), [(180, 30_000), (1_000_000, 2), (2, 3), (3.1, 3), (60_000, 64_000)]
)
def test_labels_of_the_histogram_stand_at_their_lines_and_no_line_crosses_one(
    n_star: float, b_min: int
) -> None:
    svg = drawn(sizes_chart(Counter({3: 10, 6: 1, 15: 2}), n_star, b_min))
    found = marks(svg)
    assert len(found) == 2
    assert all(LEFT <= line <= RIGHT and abs(label - line) < 7 for line, label in found.values())
    (line, label), (lower_line, lower_label) = sorted(found.values(), reverse=True)
    assert lower_label < lower_line < line, "only the lower line ends below the other's label"
    assert label > line or line > RIGHT - 100


@pytest.mark.parametrize("n_star", [0.0, 0.3])
def test_n_star_below_one_text_is_not_drawn(n_star: float) -> None:
    svg = drawn(sizes_chart(Counter({3: 10, 6: 1}), n_star, 1_000_000))
    assert list(marks(svg)) == ["B_min = 1M"] and "n*" not in words(svg)


@pytest.mark.parametrize("most", [0.0, 0.003, 1.0, 7.0, 10.0, 42.0, 99_999.0])
def test_an_axis_has_a_few_round_values(most: float) -> None:
    found = ticks(most)
    assert (
        found[0] == 0 and found[-1] <= most * 1.000001 and (4 <= len(found) - 1 <= 10 or most == 0)
    )


def test_run_reports_its_charts_and_metrics_that_can_be_plotted(bench: Workbench) -> None:
    bench.settings |= {"b_min": 10, "b_max": 20}
    for key, rows in (("a", 12), ("b", 45), ("c", 3)):
        bench.write(key, rows)
    ran = bench.refresh()
    metrics = ran.metrics()
    charts = ran.charts()
    svg = drawn(dg.MarkdownMetadataValue(charts["timeline"]))
    assert len(bars(svg)) == 3 * metrics["superbatches"] > 9
    assert ": 3 encoded in this run" in words(
        drawn(dg.MarkdownMetadataValue(charts["partition_sizes"]))
    )
    drawn(dg.MarkdownMetadataValue(charts["throughput"]))
    plotted = [
        "texts_per_second",
        "overlap_ratio",
        "duty_cycle",
        "padding_ratio",
        "fill_ratio",
        "peak_resident_bytes",
    ]
    assert all(
        isinstance(batch[name], int | float)
        for batch in (*ran.superbatches(), metrics)
        for name in plotted
    )
    assert metrics["peak_rss_bytes"] > 0
    reported = {
        name: charts[name] for name in ("superbatches", "partitions_written", "texts_encoded")
    }
    assert (
        reported == {name: metrics[name] for name in reported} and reported["texts_encoded"] == 60
    )
    predicted = {
        name: charts[name]
        for name in ("predicted_wall_seconds", "wall_seconds", "prediction_error")
    }
    assert (
        predicted == {name: metrics[name] for name in predicted}
        and charts["predicted_wall_seconds"] > 0
    )
    assert not set(plotted) & set(charts), "a point of the whole run among those of SuperBatches"
    assert not bench.refresh().charts(), "nothing was encoded"


def test_rows_of_the_last_runs_are_in_one_chart(bench: Workbench) -> None:
    bench.write("a", 12)
    bench.refresh()
    bench.write("a", 15, version="v2")
    charts = bench.refresh().charts()
    assert "last_runs" not in charts, "state is not for people"
    svg = drawn(dg.MarkdownMetadataValue(charts["rows_of_last_runs"]))
    assert "encoded (dark): 3 in this run" in words(svg) and "reused (pale): 12" in words(svg)
    heights = [
        float(box.get("height", 0)) for box in svg.iter(f"{_SVG}rect") if box.get("fill") != "#fff"
    ]
    assert heights == pytest.approx([heights[0], heights[0], heights[0] / 4], abs=1)


def test_axes_of_counts_have_whole_numbers() -> None:
    for chart in (runs_chart([(0, 0)]), sizes_chart(Counter({3: 1}), 0, 1)):
        assert "0.2" not in words(drawn(chart))


def test_n_star_follows_from_the_cost_of_a_call() -> None:
    report = RunReport(
        costs=Costs(texts_computed=100, texts_encoded=100, encode_seconds=1.0), call_seconds=0.16
    )
    svg = drawn(run_charts(report, Timeline(), Counter({3: 1}))["partition_sizes"])
    assert "n* = 16 " in words(svg)


def test_each_machine_of_a_cluster_has_a_lane_with_its_throughput_and_a_mark_where_it_was_lost() -> (
    None
):
    machines = {
        name: MachineWork(MachineFacts(name, "1", "key", "fp16", "cuda", "", 1), texts=texts)
        for name, texts in {"10.0.0.1": 4_000, "10.0.0.2": 500}.items()
    }
    for begun, ended in ((0.0, 6.0), (2.0, 8.0), (11.0, 12.0)):  # two at once
        machines["10.0.0.1"].was_at_work(begun, ended)
    machines["10.0.0.2"].was_at_work(0.0, 5.0)
    machines["10.0.0.2"].lost_at.append(7.5)
    assert [machines[name].seconds for name in machines] == [9.0, 5.0]
    timeline = timeline_of(1)
    svg = drawn(run_charts(RunReport(), timeline, Counter(), machines)["timeline"])
    assert "10.0.0.1 444 10.0.0.2 100" in words(svg)
    [first, second, third] = [(x, width) for x, width, _ in bars(svg)]
    assert first[0] == third[0] and first[1] == pytest.approx(8 * second[1], abs=1)
    assert third[1] == pytest.approx(5 * second[1], abs=1)
    assert len([line for line in svg.iter(f"{_SVG}line") if line.get("stroke") == "#b5403a"]) == 1
    many = {str(number): machines["10.0.0.2"] for number in range(1_000)}
    assert "(40 of 1,000)" in words(
        drawn(run_charts(RunReport(), timeline, Counter(), many)["timeline"])
    )
