"""Makes docs/evaluation.md of a document: `page.md` is its text, with a mark at the place of each
table.

    python -m benchmarks.evaluation --render     # again, without measuring

A mark is a line `[[name]]`: a table of `tables`, or one of the marks below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.tables import TABLES, Rows, head, line
from benchmarks.harness import Document

_TEXT = Path(__file__).with_name("page.md")
_MARK = re.compile(r"^\[\[(.+)\]\]$", re.MULTILINE)


def rows_of(document: Document) -> Rows:
    """Return what was measured, by experiment."""
    return {name: experiment["rows"] for name, experiment in document["experiments"].items()}


def render(document: Document) -> str:
    """Return the page of a document."""
    rows = rows_of(document)

    def put(mark: re.Match[str]) -> str:
        name = mark[1]
        if name in _OTHERS:
            return "\n".join(_OTHERS[name](document))
        table, experiments = TABLES[name]
        if not all(map(rows.get, experiments)):
            return "Not measured in this run."
        return "\n".join(table(rows))

    return _MARK.sub(put, _TEXT.read_text())


def _machine(document: Document) -> Iterator[str]:
    machine = document["machine"]
    libraries = ", ".join(map(" ".join, document["versions"].items()))
    facts = f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}"
    yield f"Measured on: {facts}, {libraries}."


def _measured(document: Document) -> Iterator[str]:
    together: dict[str, list[str]] = {}
    for name, experiment in document["experiments"].items():
        when = f"`{experiment['scale']}`, {experiment['date']}"
        together.setdefault(when, []).append(name.replace("_", " "))
    for when, names in together.items():
        experiments = "every experiment" if len(together) == 1 else ", ".join(names)
        yield f"- {when}: {experiments}"


def _aims(document: Document) -> Iterator[str]:
    """Yield the table of aims, without those that need a larger catalog than was measured.

    A missed one is in bold.
    """
    yield from head("aim", "target", "measured")
    for aim in aims(rows_of(document)):
        if aim.measured is None and aim.note:
            continue
        sign = "≥" if aim.at_least else "≤"
        measured = "not here" if aim.measured is None else f"{aim.measured:.4g}"
        if aim.met is False:
            measured = f"**{measured}**"
        yield line(aim.name, f"{sign} {aim.target:g}", measured)


_OTHERS: dict[str, Callable[[Document], Iterator[str]]] = {
    "machine": _machine,
    "measured": _measured,
    "aims": _aims,
}
