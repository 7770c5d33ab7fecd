"""What a person sees while a command runs: a progress bar on a terminal, messages and figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]
messages = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(unit: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """A bar, where standard error is a terminal; gives a function that takes how much is done, and of how much."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def complain(text: str) -> None:
    """Say on standard error what is wrong; the text is taken as it is."""
    messages.print(text, style="red", markup=False)


def print_json(document: dict[str, Any]) -> None:
    """One JSON document as one line."""
    print(json.dumps(document, default=str), flush=True)


def one_line(text: str, width: int = 110) -> str:
    """A text without line breaks, cut where it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"
