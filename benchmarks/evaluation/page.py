"""Makes docs/evaluation.md of a document: `page.md` is its text, with a mark where each table and chart goes.

    python -m benchmarks.evaluation --render     # again, without measuring

A mark is a line `[[name]]`. What is named is a table of `tables`, a chart as `chart:name`, or one of the marks below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.cells import head, line
from benchmarks.evaluation.scales import CLOCK, SHRINK
from benchmarks.evaluation.tables import TABLES
from benchmarks.evaluation.theory import Rows
from benchmarks.harness import Document

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "evaluation.json"
PAGE = ROOT / "docs" / "evaluation.md"
IMAGES = ROOT / "docs" / "images"

# The title of each chart, and the experiments that it needs.
CHARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sizes": ("Figure 2: partition sizes", ()),
    "throughput": ("Figures 5 and 6: throughput, and where the time goes", ("end_to_end",)),
    "profiles": ("Figure 7: storage profiles", ("profiles",)),
    "thresholds": ("Figure 8: thresholds", ("thresholds",)),
    "serialization": ("Figure 9: serialization", ("serialization",)),
    "scaling": ("Figures 1 and 10: scaling", ("scaling",)),
}

_TEXT = Path(__file__).with_name("page.md")
_MARK = re.compile(r"^\[\[(.+)\]\]$", re.MULTILINE)


def rows_of(document: Document) -> Rows:
    """What was measured, by experiment."""
    return {name: found["rows"] for name, found in document["experiments"].items()}


def render(document: Document) -> str:
    """The page of a document."""
    rows = rows_of(document)

    def put(mark: re.Match[str]) -> str:
        name, _, chart = mark[1].partition(":")
        if chart:
            title, needed = CHARTS[chart]
            return f"![{title}](images/evaluation-{chart}.svg)" if are_there(rows, needed) else ""
        if name in _OTHERS:
            return "\n".join(_OTHERS[name](document))
        table, needed = TABLES[name]
        return "\n".join(table(rows)) if are_there(rows, needed) else "Not measured in this run."

    return _MARK.sub(put, _TEXT.read_text())


def are_there(rows: Rows, needed: tuple[str, ...]) -> bool:
    """Whether all of these experiments were measured."""
    return all(rows.get(name) for name in needed)


def _machine(document: Document) -> Iterator[str]:
    machine, versions = document["machine"], document["versions"]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"Measured on: {machine['processor']}, {machine['cores']} cores, Python {machine['python']}, {libraries}."


def _scale(document: Document) -> Iterator[str]:
    yield from head("factor", "", "growing catalogs (section 5.10)")
    yield line("times of the encoder and the store, divided by", f"{CLOCK:g}", "1")
    yield line(
        "sizes of partitions, B_min, B_max, c_ipc and latencies, divided by",
        f"{SHRINK:g}",
        "1, except what is the product's own",
    )


def _measured(document: Document) -> Iterator[str]:
    yield from head("experiment", "scale", "date", "minutes", "load average at the start")
    for name, found in document["experiments"].items():
        minutes, load = f"{found['seconds'] / 60:.1f}", f"{found['load_average']:.1f}"
        yield line(name.replace("_", " "), f"`{found['scale']}`", found["date"], minutes, load)


def _aims(document: Document) -> Iterator[str]:
    yield from head("aim", "target", "measured", "")
    for aim in aims(rows_of(document)):
        sign = "at least" if aim.at_least else "at most"
        measured = "" if aim.measured is None else f"{aim.measured:.4g}"
        verdict = {True: "met", False: "**missed**", None: f"not measured here{aim.note and f': `{aim.note}`'}"}[
            aim.met
        ]
        yield line(aim.name, f"{sign} {aim.target:g}", measured, verdict)


_OTHERS: dict[str, Callable[[Document], Iterator[str]]] = {
    "machine": _machine,
    "scale": _scale,
    "measured": _measured,
    "aims": _aims,
}
