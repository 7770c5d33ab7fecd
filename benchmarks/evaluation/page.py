"""Makes docs/evaluation.md of a document: `page.md` is its text, with a mark where each table goes.

    python -m benchmarks.evaluation --render     # again, without measuring

A mark is a line `[[name]]`: a table of `tables`, or one of the marks below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.scales import CLOCK, SHRINK
from benchmarks.evaluation.tables import TABLES, Rows, head, line
from benchmarks.harness import Document

_TEXT = Path(__file__).with_name("page.md")
_MARK = re.compile(r"^\[\[(.+)\]\]$", re.MULTILINE)


def rows_of(document: Document) -> Rows:
    """What was measured, by experiment."""
    return {name: experiment["rows"] for name, experiment in document["experiments"].items()}


def render(document: Document) -> str:
    """The page of a document."""
    rows = rows_of(document)

    def put(mark: re.Match[str]) -> str:
        name = mark[1]
        if name in _OTHERS:
            return "\n".join(_OTHERS[name](document))
        table, experiments = TABLES[name]
        return (
            "\n".join(table(rows))
            if all(map(rows.get, experiments))
            else "Not measured in this run."
        )

    return _MARK.sub(put, _TEXT.read_text())


def _machine(document: Document) -> Iterator[str]:
    machine, versions = document["machine"], document["versions"]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"Measured on: {machine['processor']}, {machine['cores']} cores, Python {machine['python']}, {libraries}."


def _scale(document: Document) -> Iterator[str]:
    yield f"Times of the encoder and the store are divided by {CLOCK:g}. Sizes of partitions, B_min, B_max, c_ipc and"
    yield f"latencies are divided by {SHRINK:g}. Growing catalogs (section 5.10) have neither factor, and the product's"
    yield "own c_ipc and thresholds."


def _measured(document: Document) -> Iterator[str]:
    together: dict[str, list[str]] = {}
    for name, experiment in document["experiments"].items():
        together.setdefault(f"`{experiment['scale']}`, {experiment['date']}", []).append(
            name.replace("_", " ")
        )
    yield from (f"- {when}: {', '.join(names)}" for when, names in together.items())


def _aims(document: Document) -> Iterator[str]:
    yield from head("aim", "target", "measured", "")
    for aim in aims(rows_of(document)):
        sign = "≥" if aim.at_least else "≤"
        measured = "" if aim.measured is None else f"{aim.measured:.4g}"
        missing = f"not measured here{aim.note and f': `{aim.note}`'}"
        verdict = {True: "met", False: "**missed**", None: missing}[aim.met]
        yield line(aim.name, f"{sign} {aim.target:g}", measured, verdict)


def _chart(document: Document) -> Iterator[str]:
    if "scaling" in document["experiments"]:
        yield "![Figures 1 and 10: scaling](images/evaluation-scaling.svg)"


_OTHERS: dict[str, Callable[[Document], Iterator[str]]] = {
    "machine": _machine,
    "scale": _scale,
    "measured": _measured,
    "aims": _aims,
    "chart": _chart,
}
