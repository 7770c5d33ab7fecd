"""The command that computes a derived space from another one."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from surge_dagster.commands.settings import space_to_read, takes_settings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.compare.comparison import SAMPLE, compare
from surge_dagster.engine.compare.report import Comparison
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.model.spec import DerivedDtype
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.run.report import Failure
from surge_dagster.terminal import Json, Quiet, complain, print_json, progress_bar, terminable

Dimension = Annotated[
    int | None, typer.Option(help="Leading dimensions to keep. Default: all.", min=1)
]
ParentName = Annotated[
    str | None,
    typer.Option(
        "--space",
        help="Name of the space to derive from. Default: that of the settings, or the current.",
    ),
]
Removed = Annotated[
    Literal["report", "delete"],
    typer.Option(help="What to do with files whose partition was removed from that space."),
]
Recall = Annotated[
    bool, typer.Option("--recall", help="Measure how many of the ten nearest rows are found.")
]


@takes_settings("output")
def derive(
    settings: Settings,
    dtype: Annotated[DerivedDtype, typer.Option(help="Type of the derived vectors.")] = "float32",
    dimension: Dimension = None,
    space_name: ParentName = None,
    removed: Removed = "report",
    recall: Recall = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compute smaller vectors from the float32 files of a space, without its model."""
    store = settings.open_store()
    parent, _ = space_to_read(settings, store, yes=True, name=space_name)
    if parent.derived and space_name is None:
        parent = named_space(store, parent.derived.parent)
    run = DeriveRun(store, parent, dtype, dimension, removed=removed)
    report = run.report
    with terminable(), progress_bar("rows", quiet=quiet) as show:
        for event in run.events():
            if isinstance(event, Failure):
                complain(f"refused: {event.reason}")
            show(report.rows, None)
    if removed == "report":
        for key in report.partitions_removed:
            complain(
                f"partition {key!r} was removed from {parent.name}; --removed delete deletes its "
                "file"
            )
    if not quiet:
        print(f"{report.in_words()}\nfiles are in {store.location(report.space)}")
    found: Comparison | None = None
    if recall:
        found = compare(store, parent, run.space, SAMPLE, settings.encoder_pool)
        if not quiet:
            print(found.in_words())
    if as_json:
        print_json(report.as_dict() | {"recall": found and found.as_dict()})
    raise typer.Exit(1 if report.partitions_failed else 0)
