"""The queries of a comparison: from a CSV file, with or without relevant rows, or drawn from the
texts of a space.

A file has the column `query`, and for relevant rows `id`, with `partition` if partitions have the
same ids. A query with several relevant rows has a line for each.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.readers.search import rows_of
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.printable import first_line

_HEADERS = (["query"], ["query", "id"], ["query", "partition", "id"])
_REMEDY = "Give it as CSV in UTF-8 with the columns query, or query,id, or query,partition,id."


@dataclass(frozen=True, slots=True)
class Label:
    """A relevant row; `partition` is None if the file does not name it."""

    partition: str | None
    id: str


@dataclass(slots=True)
class Query:
    """A text to search for.

    Attributes:
        labels: its relevant rows, with the line of the file that names each.
        own: of a drawn text, its row, which is no result of it.
        vector: of a drawn text, that of its row, float32.
    """

    text: str
    labels: dict[Label, int] = field(default_factory=dict)
    own: Hashable = None
    vector: np.ndarray | None = None


def read_queries(path: str | Path) -> list[Query]:
    """Return the queries of a file; raises `ConfigError` with the line that is wrong."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as source:
            return _read(str(path), source)
    except (OSError, UnicodeError) as error:
        message = f"the queries in {str(path)!r} cannot be read: {first_line(error)}. {_REMEDY}"
        raise ConfigError(message) from error


def _read(path: str, source: TextIO) -> list[Query]:
    rows = csv.DictReader(source, strict=True)

    def refuse(reason: str, remedy: str = _REMEDY) -> NoReturn:
        raise ConfigError(f"{path!r}, line {max(1, rows.reader.line_num)}: {reason}. {remedy}")

    queries: dict[str, Query] = {}
    try:
        names = rows.fieldnames or []
        if sorted(names) not in map(sorted, _HEADERS):
            refuse(f"the columns are {', '.join(names) or 'missing'}")
        for row in rows:
            if len(row) > len(names):
                refuse(f"it has more than {len(names)} values", "Put commas into quotes.")
            for name in names:
                if not (row[name] or "").strip():
                    refuse(f"{name} is empty", "Fill it in, or remove the line.")
            query = queries.setdefault(row["query"], Query(row["query"]))
            if "id" in names:
                query.labels.setdefault(
                    Label(row.get("partition"), row["id"]), rows.reader.line_num
                )
    except csv.Error as error:
        refuse(str(error))
    if not queries:
        refuse("there are no queries")
    return list(queries.values())


def draw_queries(
    store: Store,
    space: Space,
    files: Sequence[PublishedFile],
    count: int,
    columns: list[str],
    identify: Callable[[pa.RecordBatch, int, str], Hashable],
) -> list[Query]:
    """Return rows of a space as queries, drawn with a fixed seed; reads only their files. A blank
    text is no query.

    Args:
        columns: what `identify` needs.
    """
    ends = np.cumsum([0, *(file.facts.rows for file in files)])
    total = int(ends[-1])
    drawn = np.sort(random.Random(0).sample(range(total), min(count, total)))
    queries: list[Query] = []
    for file, start, end in zip(files, ends, ends[1:], strict=False):
        places = drawn[(drawn >= start) & (drawn < end)] - start
        if not len(places):
            continue
        read = 0
        for key, batch in rows_of(store, space, [file], ["text", *columns]):
            here = places[(places >= read) & (places < read + len(batch))] - read
            texts = batch.column("text") if "text" in batch.schema.names else None
            for row in here.tolist():
                text = "" if texts is None else texts[row].as_py()
                if texts is None or text.strip():
                    vector = matrix_of(batch)[row].astype(np.float32)
                    queries.append(Query(text, own=identify(batch, row, key), vector=vector))
            read += len(batch)
    if not queries:
        raise ConfigError(f"the texts of {space.name} are blank. Give a file of queries.")
    return queries
