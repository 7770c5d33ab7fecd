"""The rows of an open Delta table, or why they cannot be read rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.support.printable import first_line

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from deltalake import DeltaTable


def delta_dataset(key: str, table: DeltaTable) -> ds.Dataset:
    """Return a Delta table as a dataset with its files in the order of their names.

    Their order in the log changes with a checkpoint.
    """
    import pyarrow.dataset as ds  # imports pandas: 0.7 s, in every process of Dagster

    # A file's columns then have other names, and pyarrow would give nulls for them.
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise _unreadable(key, "has column mapping, since a column was renamed or dropped")
    try:
        dataset: Any = table.to_pyarrow_dataset()
    except Exception as error:  # deltalake's errors have no base class
        raise _unreadable(key, f"cannot be read ({first_line(error)})") from error
    files = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
    return ds.FileSystemDataset(files, dataset.schema, dataset.format, dataset.filesystem)


def _unreadable(key: str, problem: str) -> DataError:
    remedy = "Copy it to a table without this (CREATE TABLE … AS SELECT), and give the copy."
    return DataError(key, f"the Delta table {problem}", remedy)
