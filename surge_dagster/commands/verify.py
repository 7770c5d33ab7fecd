"""The command that compares every file with the catalog, and encodes some rows again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer

from surge_dagster.commands.settings import (
    CATALOG,
    SPACE,
    SpaceName,
    Yes,
    recorded_source,
    space_to_read,
    start_pool,
    takes_settings,
)
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.verify.verification import Compared, Verified, Violation
from surge_dagster.engine.verify.verification import verify as verify_output
from surge_dagster.terminal import Json, Quiet, complain, print_json, progress_bar

Reencode = Annotated[
    str,
    typer.Option(
        help="Rows of each partition to encode again: a number, or `all`.", metavar="N|all"
    ),
]
Partial = Annotated[
    bool, typer.Option("--partial", help="Accept partitions without a file; only count them.")
]


@takes_settings("source", "output", *SPACE, "devices", *CATALOG)
def verify(
    settings: Settings,
    reencode: Reencode = "3",
    partial: Partial = False,
    space_name: SpaceName = None,
    yes: Yes = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Prove that every partition has a file with its rows, in order, each with its own vector.

    Changes nothing. Reads the space of the settings, else the current or only one.
    """
    rows = _rows_to_reencode(reencode)
    store = settings.open_store()
    space, spec = space_to_read(settings, store, yes=yes or rows == 0, name=space_name)
    catalog = recorded_source(settings, store, space)
    pool = None
    if rows != 0 and not space.derived:
        pool = start_pool(settings, spec)

    found = _Verification(partial)
    with pool or nullcontext(), progress_bar("partitions", quiet=quiet) as show:
        total = sum(1 for _ in catalog)
        for event in verify_output(catalog, store, space, pool=pool, reencode=rows):
            found.add(event)
            show(found.partitions, total)
    if not quiet:
        print(f"{space.name}: {found.in_words()}")
    if found.is_empty:
        complain("nothing was verified, because no partition has a file")
    if as_json:
        print_json({"space": space.name} | found.as_dict())
    raise typer.Exit(1 if found.violations or found.is_empty else 0)


def _rows_to_reencode(value: str) -> int | None:
    if value == "all":
        return None
    if value.isdecimal():
        return int(value)
    raise ConfigError(f"--reencode is {value!r}; expected a number of rows, or `all`.")


class _Verification:
    """Counts what a verification finds, and names each fault on standard error."""

    def __init__(self, accepts_missing: bool) -> None:
        self.partitions = 0
        self.violations: list[Violation] = []
        self._accepts_missing = accepts_missing
        self._warnings: list[Violation] = []
        self._texts = 0
        self._compared = Compared(0, 0, 0, None)

    def add(self, event: Verified | Violation | Compared) -> None:
        match event:
            case Verified():
                self.partitions += 1
                self._texts += event.rows
            case Compared():
                self._compared = event
            case Violation():
                self._add_violation(event)

    def _add_violation(self, violation: Violation) -> None:
        label = "violation"
        listed = self.violations
        if violation.is_warning or (self._accepts_missing and violation.has_no_file):
            label = "warning"
            listed = self._warnings
        listed.append(violation)
        complain(f"{label} ({violation.kind}): partition {violation.key!r}: {violation.reason}")

    @property
    def _without_file(self) -> int:
        return sum(each.has_no_file for each in (*self.violations, *self._warnings))

    @property
    def is_empty(self) -> bool:
        """Whether no file was read."""
        return self._without_file == self.partitions

    def in_words(self) -> str:
        verdict = "no violation"
        if self.violations:
            verdict = counted(len(self.violations), "violation")
        if self._warnings:
            verdict += f", {counted(len(self._warnings), 'warning')}"
        return (
            f"{counted(self.partitions, 'partition')}, {self._without_file:,} without a file, "
            f"{counted(self._texts, 'text')} read, {_in_words(self._compared)}: {verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        listed: list[dict[str, Any]] = []
        for violation in (*self.violations, *self._warnings):
            listed.append(asdict(violation) | {"reason": violation.reason})
        return {
            "partitions": self.partitions,
            "partitions_without_file": self._without_file,
            "texts": self._texts,
            "vectors_compared": self._compared.vectors,
            "seed": self._compared.seed,
            "partitions_not_compared": self._compared.partitions_not_compared,
            "violations": listed,
        }


def _in_words(compared: Compared) -> str:
    partitions = counted(compared.partitions, "partition")
    line = f"{counted(compared.vectors, 'vector')} of {partitions} compared"
    if compared.partitions_not_compared:
        line += f" and those of {compared.partitions_not_compared:,} not"
    if compared.seed is not None:
        line += f" (seed {compared.seed})"
    return line
