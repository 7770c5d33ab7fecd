"""What commands share: a progress bar, messages, JSON output, and SIGTERM as an exception."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from surge_dagster.engine.support.printable import visible

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors: no progress and no summary.")
]
messages = Console(stderr=True, highlight=False, soft_wrap=True)
LINE_SECONDS = 10.0
TERMINATED_CODE = 128 + signal.SIGTERM


class Terminated(BaseException):
    """The process got SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` in the main thread on SIGTERM; further ones are ignored.

    SIGTERM (a spot machine ends, `kill`, a service stops) would end Python at once with nothing
    published. As an exception it takes the same way out as Ctrl-C: the run publishes what is
    encoded within its grace time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bar(unit: str, *, quiet: bool = False) -> Iterator[Callable[[int, int | None], None]]:
    """Show progress on standard error, given the amount done and the total if known: a bar, or a
    line every 10 s."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=messages, disable=quiet or not messages.is_terminal) as bar:
        if quiet or messages.is_terminal:
            task = bar.add_task(unit, total=None)
            yield lambda done, of: bar.update(task, completed=done, total=of)
        else:
            yield _lines(unit)


def _lines(unit: str) -> Callable[[int, int | None], None]:
    begun = time.monotonic()
    printed = begun

    def show(done: int, of: int | None) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= LINE_SECONDS:
            printed = now
            known = f" of {of:,}" if of else ""
            seconds = now - begun
            messages.print(
                f"{done:,}{known} {unit} in {seconds:,.0f} s, {done / seconds:,.0f} per second",
                markup=False,
            )

    return show


def complain(text: str) -> None:
    """Print an error or a warning on standard error, without markup and control characters."""
    messages.print("\n".join(map(visible, text.split("\n"))), style="red", markup=False)


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows on standard output as a table, the first one as its header."""
    table = Table(title=title, show_lines=True)
    for name in rows[0]:
        table.add_column(Text(visible(name)))
    for row in rows[1:]:
        table.add_row(*(Text("\n".join(map(visible, cell.split("\n")))) for cell in row))
    Console().print(table)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document as one line; numbers that JSON lacks, such as NaN, are null."""
    print(json.dumps(_with_json_numbers(document), default=str), flush=True)


def _with_json_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_json_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_json_numbers(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def one_line(text: str, width: int = 110) -> str:
    """Return a text without line breaks and control characters, cut to a width."""
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"
