"""Which columns of a source become the ids and texts of a partition.

A source asks its `Selection` for the columns to read and hands it the raw batches of a partition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

import pyarrow as pa

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import RowBatch
from surge_dagster.engine.sources.rows import DEFAULT_MAX_TEXT_BYTES, row_batch
from surge_dagster.engine.sources.template import Template

# Source versions do not name these columns: the files of every existing catalog would become stale.
_USUAL_COLUMNS = {"id_column": "id", "text_column": "text"}


@dataclass(frozen=True, slots=True)
class Selection:
    """What is taken of a source's columns.

    Attributes:
        id: the column that identifies a row within its partition.
        text: the column that is embedded, or a template of columns in braces such as "{title}. {description}".
        max_text_bytes: a longer text refuses its partition.

    Raises:
        ConfigError: the template cannot be used.
    """

    id: str = "id"
    text: str = "text"
    max_text_bytes: int = DEFAULT_MAX_TEXT_BYTES
    _template: Template | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_template = "{" in self.text or "}" in self.text
        object.__setattr__(self, "_template", Template.compile(self.text) if is_template else None)

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        texts = (self.text,) if self._template is None else self._template.columns
        return list(dict.fromkeys((self.id, *texts)))

    @property
    def version_suffix(self) -> str:
        """What every source version ends in, since another selection is other content; mostly empty.

        Columns of other than the usual names are named, as in `?text_column=title`; a template is named by its digest.
        """
        chosen = {"id_column": self.id, "text_column": self.text}
        unusual = {name: column for name, column in chosen.items() if column != _USUAL_COLUMNS[name]}
        if self._template is not None:
            del unusual["text_column"]
            unusual["text"] = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return f"?{urlencode(unusual, errors='surrogatepass')}" if unusual else ""

    def require_columns(self, key: str, shown: str, names: Sequence[str]) -> None:
        """Refuse a file that does not have each column once.

        Args:
            key: the partition.
            shown: the file's name in messages.
            names: all its columns.

        Raises:
            DataError: a column is missing or there twice.
        """
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise DataError(
                key,
                f"{shown} has no column {' and no column '.join(map(repr, missing))}; "
                f"its columns are {', '.join(map(repr, names))}",
                "Name the right ones with the settings id and text.",
            )
        twice = [name for name in self.columns if names.count(name) > 1]
        if twice:
            raise DataError(key, f"{shown} has two columns {twice[0]!r}", "Rename one of them.")

    def row_batches(self, key: str, batch: pa.RecordBatch, first_row: int) -> Iterator[RowBatch]:
        """Check and convert consecutive rows of a partition; what is yielded holds all of them, in order.

        Args:
            key: the partition, for messages.
            batch: at least the selected `columns`, each once, dictionary-encoded or not; a few megabytes.
            first_row: zero-based row of the batch's first row in its partition.

        Raises:
            DataError: a null, invalid UTF-8, an overlong text, or a column of another type.
        """
        ids = batch.column(self.id)
        if self._template is None:
            yield row_batch(key, ids, batch.column(self.text), first_row, self.max_text_bytes)
            return
        for rows, texts in self._template.texts(key, batch, first_row, self.max_text_bytes):
            yield row_batch(key, ids[rows], texts, first_row + rows.start, self.max_text_bytes)
