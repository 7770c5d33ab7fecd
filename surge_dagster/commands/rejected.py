"""The command that prints the rows that were set aside."""

from __future__ import annotations

from typing import Any

from surge_dagster.commands.settings import (
    SpaceName,
    space_to_read,
    takes_settings,
)
from surge_dagster.config.settings import Settings
from surge_dagster.engine.output.rejected import RejectedOfPartition, rejected_of_space
from surge_dagster.engine.support.counts import counted
from surge_dagster.terminal import Json, complain, one_line, print_json


@takes_settings("output")
def rejected(settings: Settings, space_name: SpaceName = None, as_json: Json = False) -> None:
    """Print the bad rows that were set aside: where they are, their ids, and what is wrong.

    Reads the space of the settings, else the current or only one.
    """
    store = settings.open_store()
    space, _ = space_to_read(settings, store, yes=True, name=space_name)

    partitions: list[dict[str, Any]] = []
    rows = 0
    transient = 0
    for found in rejected_of_space(store, space):
        _print_partition(found)
        rows += found.rows
        transient += found.transient
        if as_json:
            partitions.append(_as_dict(found))

    line = f"{space.name}: {counted(rows, 'row')} set aside"
    if transient:
        line += f", {transient:,} of them until the next run"
    print(line)
    if as_json:
        document = {"space": space.name, "rejected_rows": rows, "transient_rows": transient}
        print_json(document | {"partitions": partitions})


def _print_partition(found: RejectedOfPartition) -> None:
    key = one_line(found.key)
    for row in found.listed:
        id = "without an id" if row["id"] is None else f"id {one_line(row['id'])}"
        print(f"{key}  {one_line(row['place'])}  {id}  {row['kind']}: {row['reason']}")
    if found.rows > len(found.listed):
        complain(
            f"partition {found.key!r}: its list has {len(found.listed):,} of "
            f"{counted(found.rows, 'row')} set aside"
        )


def _as_dict(found: RejectedOfPartition) -> dict[str, Any]:
    return {
        "key": found.key,
        "rejected_rows": found.rows,
        "transient_rows": found.transient,
        "rows": found.listed,
    }
