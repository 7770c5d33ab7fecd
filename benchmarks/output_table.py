"""The output benchmark's document for people: a table per scenario, and a chart of the storage profiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.table import aim_lines
from benchmarks.targets import Target

Document = dict[str, Any]

_WIDTH, _ROW, _LEFT, _BARS = 760, 52, 110, 430
_COLOURS = {"async": "#2f6f9f", "sync": "#c98a3a"}


def output_lines(document: Document, aims: list[Target]) -> Iterator[str]:
    """The whole report, line by line."""
    machine = document["machine"]
    low, high = document["load_average"]
    yield f"{machine['processor']}, {machine['cores']} cores; load average {low:.1f} before, {high:.1f} after"
    if "serialization" in document:
        yield from _serialization(document["serialization"])
    if "profiles" in document:
        yield from _profiles(document["profiles"])
    if "tiny" in document:
        yield from _tiny(document["tiny"])
    if "bound" in document:
        yield from _bound(document["bound"])
    yield from aim_lines(aims)


def _serialization(sizes: list[Document]) -> Iterator[str]:
    yield ""
    yield (
        f"{'serialization':>14}{'seconds':>9}{'MB/s':>8}{'memcpy':>9}{'naive s':>9}{'ratio':>8}{'extra':>8}"
        f"{'naive':>8}{'checks':>8}{'disk MB/s':>11}{'raw MB/s':>10}"
    )
    for size in sizes:
        megabytes = size["matrix_bytes"] / 1e6
        yield (
            f"{size['rows']:>9,} rows{size['seconds']:>9.3f}{megabytes / size['seconds']:>8,.0f}"
            f"{megabytes / size['memcpy_seconds']:>9,.0f}{size['naive_seconds']:>9.2f}{size['ratio_to_naive']:>7.1f}x"
            f"{size['extra_memory']:>7.2f}x{size['naive_extra_memory']:>7.2f}x{size['validation_share']:>8.1%}"
            f"{megabytes / size['disk_seconds']:>11,.0f}{megabytes / size['raw_write_seconds']:>10,.0f}"
        )


def _profiles(found: Document) -> Iterator[str]:
    yield ""
    yield (
        f"storage profiles: {found['partitions']} partitions of {found['texts_per_partition']:,} texts, an encoder of "
        f"{found['encoder_texts_per_second']:,.0f} texts/s, median of {found['rounds']} rounds"
    )
    yield (
        f"{'':14}{'latency':>9}{'sync':>9}{'async':>9}{'gain':>8}{'published':>11}{'async to first':>16}"
        f"{'rho sync':>10}{'rho async':>11}"
    )
    for row in found["profiles"]:
        yield (
            f"{row['name']:14}{1_000 * row['latency_seconds']:>6.0f} ms{row['sync_texts_per_second']:>9,.0f}"
            f"{row['async_texts_per_second']:>9,.0f}{row['gain']:>+8.1%}{row['published_gain']:>+11.1%}"
            f"{row['async_to_first']:>16.3f}{row['sync_overlap_ratio']:>10.2f}{row['async_overlap_ratio']:>11.2f}"
        )


def _tiny(found: Document) -> Iterator[str]:
    yield ""
    yield (
        f"{found['partitions']:,} partitions of {found['texts_per_partition']} texts, files of "
        f"{found['file_bytes']:,.0f} bytes, median of {found['rounds']} rounds"
    )
    for name, rate in found["partitions_per_second"].items():
        yield f"{name:32}{rate:>10,.0f} per second"


def _bound(found: Document) -> Iterator[str]:
    yield ""
    yield f"memory under a limit of {found['limit_bytes'] / 1e6:,.0f} MB"
    yield f"{'':26}{'partitions':>12}{'texts':>12}{'ledger MB':>12}{'above start MB':>16}{'seconds':>10}"
    for case in found["cases"]:
        yield (
            f"{case['case']:26}{case['partitions']:>12,}{case['texts']:>12,}{case['ledger_peak_bytes'] / 1e6:>12,.0f}"
            f"{case['above_start_bytes'] / 1e6:>16,.0f}{case['wall_seconds']:>10,.1f}"
        )


def profiles_chart(found: Document) -> str:
    """Throughput of both ways on each profile, with rho, as an SVG document."""
    rows = found["profiles"]
    most = max(max(row["sync_texts_per_second"], row["async_texts_per_second"]) for row in rows)
    height = _ROW * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="22" font-size="15">Texts per second on each storage profile</text>',
    ]
    for place, (way, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 300 + 150 * place
        parts.append(f'<rect x="{x}" y="11" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="22">{way}hronous</text>')
    for place, row in enumerate(rows):
        top = 44 + _ROW * place
        parts.append(f'<text x="10" y="{top + 24}">{row["name"]}</text>')
        for line, (way, colour) in enumerate(_COLOURS.items()):
            rate, y = row[f"{way}_texts_per_second"], top + 20 * line
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{_BARS * rate / most:.1f}" height="17" fill="{colour}"/>'
                f'<text x="{_LEFT + _BARS * rate / most + 8:.1f}" y="{y + 13}">{rate:,.0f} '
                f"(rho {row[f'{way}_overlap_ratio']:.2f})</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
