"""Which columns of a source become ids and texts, and which travel with them into the output.

A source reads the columns of its `Selection` and passes the raw batches of a partition to it. A
null, a text that is not UTF-8 and a text beyond the maximum are refused here, where the number of
the row is still known. Arrow does not check that Parquet's strings are UTF-8, and a wrong byte
would end a worker in its tokenizer.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources.bad_rows import (
    FirstIds,
    Reasons,
    is_not_utf8,
    plain_batch,
    reasons_of,
    with_first_ids,
    with_rejected,
)
from surge_dagster.engine.sources.casting import (
    UnfitValue,
    canonical_type,
    cast_column,
    is_blank,
    null_where,
    plain_column,
)
from surge_dagster.engine.sources.partition import Place, RejectedRow, RowBatch, row_in_words
from surge_dagster.engine.sources.template import Template
from surge_dagster.engine.support.values import stored_type, value_lengths

DEFAULT_MAX_TEXT_BYTES = 4 * 1024 * 1024
_NO_ESCAPE = '",;\t|\r\n'
BadRows = Literal["refuse", "set_aside"]
MissingText = Literal["refuse_nulls", "refuse", "skip", "empty"]
# Columns of an output, which no carried column may be named like.
OWN_COLUMNS = ("partition", "id", "text", "text_hash", "truncated", "embedding", "op")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is read of a source's columns.

    Attributes:
        text: the column that is embedded, or a template such as "{title}. {description}".
        max_text_bytes: a longer text makes a bad row.
        missing_text: what to do with a row whose text is null or blank: refuse its partition, skip
            it, or embed an empty text; `refuse_nulls` embeds blank texts as they are.
        carried: further columns that travel with the rows into the output, in this order.
        encoding: of CSV files.
        escape: the character of CSV files before a quote in quotes, as Spark and MySQL write it.
        bad_rows: what to do with a row that is invalid: refuse its partition, or set it aside.
        passage: a column of the template, whose place in each text `RowBatch.passages` tells.
    """

    id: str = "id"
    text: str = "text"
    max_text_bytes: int = DEFAULT_MAX_TEXT_BYTES
    missing_text: MissingText = "refuse_nulls"
    # names of what is cached are made of the rest
    carried: tuple[str, ...] = field(default=(), repr=False)
    encoding: str = "utf-8"
    escape: str | None = None
    bad_rows: BadRows = "refuse"
    passage: str | None = None
    _template: Template | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_template = "{" in self.text or "}" in self.text
        object.__setattr__(self, "_template", Template.compile(self.text) if is_template else None)
        object.__setattr__(self, "encoding", _codec_name(self.encoding))
        if self.escape is not None and (len(self.escape) != 1 or self.escape in _NO_ESCAPE):
            raise ConfigError(
                f"the escape {self.escape!r} cannot be that of a CSV file; expected one character, "
                "such as a backslash"
            )
        if self.passage is not None:
            self._require_passage(self.passage)
        for place, name in enumerate(self.carried):
            if name in OWN_COLUMNS:
                raise ConfigError(
                    f"the column {name!r} cannot be carried: the output has a column of that name. "
                    "Rename it in the source, or leave it out of columns."
                )
            if name in self.carried[:place]:
                raise ConfigError(f"the column {name!r} is named twice in columns. Name each once.")

    def _require_passage(self, column: str) -> None:
        names = [self.text]
        if self._template is not None:
            names = [name for _, name in self._template.parts if name is not None]
        if names.count(column) != 1:
            raise ConfigError(
                f"the column {column!r} cannot be cut into chunks: expected a column that the text "
                f"{self.text!r} has once. Name one of {', '.join(dict.fromkeys(names))}."
            )

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        return list(dict.fromkeys((self.id, *self._text_columns, *self.carried)))

    @property
    def _text_columns(self) -> Sequence[str]:
        return (self.text,) if self._template is None else self._template.columns

    @property
    def id_bytes(self) -> int:
        """See `Partition`."""
        return FirstIds.ROW_BYTES if self.bad_rows == "set_aside" else 0

    @property
    def version_suffix(self) -> str:
        """The end of every source version, as in `?text_column=title`: another selection is other
        content."""
        unusual: dict[str, str | tuple[str, ...]] = {}
        if self.id != "id":
            unusual["id_column"] = self.id
        if self._template is not None:
            text = self.text.encode("utf-8", "surrogatepass")
            unusual["text"] = hashlib.sha256(text).hexdigest()[:16]
        elif self.text != "text":
            unusual["text_column"] = self.text
        if self.missing_text != "refuse_nulls":
            unusual["missing_text"] = self.missing_text
        if self.carried:
            unusual["columns"] = self.carried
        if self.bad_rows != "refuse":
            unusual["bad_rows"] = self.bad_rows
            unusual["max_text_bytes"] = str(self.max_text_bytes)
        if self.encoding != "utf-8":
            unusual["encoding"] = self.encoding
        if self.escape is not None:
            unusual["escape"] = self.escape
        if not unusual:
            return ""
        return f"?{urlencode(unusual, doseq=True, errors='surrogatepass')}"

    def rows(
        self,
        key: str,
        batches: Iterable[pa.RecordBatch],
        first_row: int = 0,
        place: Place = row_in_words,
        first_ids: FirstIds | None = None,
    ) -> Iterator[RowBatch]:
        """Check and convert the rows of consecutive batches; yield all that are neither skipped nor
        set aside.

        Args:
            batches: of at least the selected `columns`, dictionary-encoded or not; a few megabytes.
            first_row: of the first batch, zero-based, in the partition.
            place: of a row of the partition.
            first_ids: of the rows before these, if the partition is not read in one call.
        """
        first_ids = first_ids or FirstIds()
        for batch in batches:
            rows = np.arange(first_row, first_row + len(batch))
            try:
                if self.bad_rows == "set_aside":
                    yield self._sound_rows(key, batch, rows, place, first_ids)
                else:
                    yield self._row_batch(key, batch, rows, place)
            except DataError as error:
                if error.row is None:
                    raise
                shown = place(error.row)
                raise DataError(error.key, error.reason, error.remedy, error.row, shown) from error
            first_row += len(batch)

    def _sound_rows(
        self, key: str, batch: pa.RecordBatch, rows: np.ndarray, place: Place, first_ids: FirstIds
    ) -> RowBatch:
        """Return the rows that are not bad, and name the others."""
        if reasons_of(batch).null_count == len(batch):
            try:
                return self._row_batch(key, batch, rows, place, first_ids)
            except DataError as error:
                if error.row is None:
                    raise
        batch = plain_batch(batch)
        rejected: list[RejectedRow] = []
        for find in (self._unreadable_rows, self._unfit_rows):
            reasons = find(key, batch, rows)
            rejected += reasons.rejected(rows, batch.column(self.id), place)
            batch = batch.filter(pa.array(reasons.is_sound))
            rows = rows[reasons.is_sound]
        checked = self._row_batch(key, batch, rows, place, first_ids)
        return with_rejected(checked, rejected)

    def _unreadable_rows(self, key: str, batch: pa.RecordBatch, rows: np.ndarray) -> Reasons:
        """Find the rows that their file's reader could not parse, or whose text is not text."""
        reasons = Reasons.of_reader(batch)
        for name in self.columns:
            is_bad = is_not_utf8(key, name, batch.column(name))  # or refuse what is damaged
            if name in self._text_columns:
                reasons.add(is_bad, _not_utf8("text"))
        return reasons

    def _unfit_rows(self, key: str, batch: pa.RecordBatch, rows: np.ndarray) -> Reasons:
        """Find the other rows that `_row_batch` refuses. What it skips is not checked."""
        reasons = Reasons(len(batch))
        texts = canonical_texts(key, self._texts(key, batch, rows))
        is_missing = texts.is_null().to_numpy(zero_copy_only=False)
        is_checked = np.ones(len(batch), np.bool_)
        if self.missing_text == "skip":
            is_checked = ~is_missing
        elif self.missing_text != "empty":
            reasons.add(is_missing, self._missing)

        lengths = value_lengths(texts)
        is_long = ~is_missing & (lengths > self.max_text_bytes)
        sizes = lengths[is_long].tolist()
        reasons.add(is_long, list(map(self._too_long, sizes)))
        has_no_id = batch.column(self.id).is_null().to_numpy(zero_copy_only=False)
        reasons.add(is_checked & has_no_id, "the id is null; every row needs one")
        for name in (self.id, *self.carried):
            shown = "id" if name == self.id else name
            is_bad = is_not_utf8(key, shown, batch.column(name))
            reasons.add(is_checked & is_bad, _not_utf8(shown))
        return reasons

    @property
    def _missing(self) -> str:
        """What is wrong with a row without a text."""
        if self.missing_text == "refuse":
            return "the text is null or blank; every row needs one"
        return "the text is null; every row needs one"

    def _too_long(self, size: int) -> str:
        return f"the text has {size:,} bytes; at most {self.max_text_bytes:,} are allowed"

    def _row_batch(
        self,
        key: str,
        batch: pa.RecordBatch,
        rows: np.ndarray,
        place: Place,
        first_ids: FirstIds | None = None,
    ) -> RowBatch:
        texts = self._texts(key, batch, rows)
        ids = batch.column(self.id)
        carried = None
        if self.carried:
            carried = _carried_columns(key, batch, self.carried, rows)
        passages = None
        if self.passage is not None and self._template is not None and len(batch):
            passages = self._template.passages(key, batch, rows, self.passage)
        skipped = 0
        if self.missing_text == "empty":
            texts = texts.fill_null("")
        elif self.missing_text != "refuse_nulls" and texts.null_count:
            present = texts.is_valid()
            has_text = present.to_numpy(zero_copy_only=False)
            if self.missing_text == "refuse":
                raise DataError(
                    key,
                    self._missing,
                    "Fill it or drop the row in the source, or set missing_text to skip or empty.",
                    int(rows[int(np.argmin(has_text))]),
                )
            skipped = texts.null_count
            ids = ids.filter(present)
            texts = texts.drop_null()
            rows = rows[has_text]
            if passages is not None:
                passages = passages[has_text]
            if carried is not None:
                carried = carried.filter(present)
        ids = _canonical_ids(key, plain_column(ids), rows)
        texts = canonical_texts(key, texts)
        self._require_usable(key, ids, texts, rows)
        if carried is not None:
            for name, column in zip(carried.schema.names, carried.columns, strict=True):
                _require_valid(key, name, column, rows)
        checked = RowBatch(
            ids,
            texts,
            skipped,
            carried,
            lambda row: place(int(rows[row])),
            numbers=rows,
            passages=passages,
        )
        if first_ids is not None:
            checked = with_first_ids(checked, rows, place, first_ids)
        return checked

    def _require_usable(
        self, key: str, ids: pa.Array, texts: pa.Array, rows: Sequence[int] | np.ndarray
    ) -> None:
        for name, column in (("id", ids), ("text", texts)):
            if column.null_count:
                offset = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                further = "set bad_rows to set_aside"
                if name == "text":
                    further = f"set missing_text to skip or empty, or {further}"
                raise DataError(
                    key,
                    f"the {name} is null; every row needs one",
                    f"Fill or drop the {name} in the source, then run again, or {further}.",
                    int(rows[offset]),
                )
            _require_valid(key, name, column, rows)
        lengths = value_lengths(texts)
        if lengths.max(initial=0) > self.max_text_bytes:
            offset = int(np.argmax(lengths > self.max_text_bytes))
            raise DataError(
                key,
                self._too_long(int(lengths[offset])),
                "Shorten it in the source, raise max_text_bytes (a model reads only its first "
                "tokens), or set bad_rows to set_aside.",
                int(rows[offset]),
            )

    def _texts(self, key: str, batch: pa.RecordBatch, rows: np.ndarray) -> pa.Array:
        """Return the texts; null if they are missing. Without rows, columns may have any type."""
        if not len(batch):
            return pa.array([], pa.large_string())
        blank_is_null = self.missing_text != "refuse_nulls"
        if self._template is not None:
            return self._template.texts(key, batch, rows, blank_is_null=blank_is_null)
        texts = batch.column(self.text)
        if not blank_is_null:
            return texts
        texts = canonical_texts(key, texts)
        return null_where(is_blank(texts), texts)


def _codec_name(encoding: str) -> str:
    """Return Python's name of an encoding of text files."""
    try:
        "".encode(encoding)  # not every codec is one of texts
        return codecs.lookup(encoding).name
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"the encoding {encoding!r} is unknown, or not that of a file; expected one such as "
            "cp1252"
        ) from error


def _carried_columns(
    key: str, batch: pa.RecordBatch, names: Sequence[str], rows: np.ndarray
) -> pa.RecordBatch:
    """Return the carried columns in types that every source and every output file can have."""
    columns: list[pa.Array] = []
    for name in names:
        column = plain_column(batch.column(name))
        try:
            columns.append(cast_column(column, _carried_type(column.type)))
        except UnfitValue as error:
            raise error.refused(key, name, rows) from error
    return pa.RecordBatch.from_arrays(columns, list(names))


def _carried_type(kind: pa.DataType) -> pa.DataType:
    try:
        return stored_type(canonical_type(kind))
    except TypeError:
        raise UnfitValue(f"has type {kind}, which cannot be carried into files") from None


def _canonical_ids(key: str, column: pa.Array, rows: Sequence[int] | np.ndarray) -> pa.Array:
    """Return ids as string, int64 or binary; a column without rows may have any type."""
    kind = canonical_type(column.type)
    if pa.types.is_integer(column.type):
        kind = pa.int64()
    if kind not in (pa.string(), pa.int64(), pa.binary()):
        if not len(column):
            return pa.array([], pa.string())
        raise DataError(
            key,
            f"the id column has type {column.type}; expected string, integer or binary",
            "Cast it in the source, or name another id column.",
        )
    try:
        return cast_column(column, kind)
    except UnfitValue as error:
        raise error.refused(key, "id", rows) from error


def canonical_texts(key: str, column: pa.Array) -> pa.LargeStringArray:
    """Return texts as large_string; raise `DataError` for a column of another type."""
    plain = plain_column(column)
    if canonical_type(plain.type) != pa.string():
        raise DataError(
            key,
            f"the text column has type {column.type}; expected string",
            "Cast it in the source, or name another text column.",
        )
    return cast_column(plain, pa.large_string())  # pyright: ignore[reportReturnType]


def _require_valid(key: str, name: str, column: pa.Array, rows: Sequence[int] | np.ndarray) -> None:
    """Refuse a column with values that Arrow does not accept."""
    bad = np.flatnonzero(is_not_utf8(key, name, column))
    if len(bad):
        raise DataError(
            key,
            _not_utf8(name),
            "Re-encode it in the source, or set encoding for a CSV file, then run again.",
            int(rows[bad[0]]),
        )


def _not_utf8(name: str) -> str:
    return f"the {name} is not valid UTF-8"


class ColumnSettings(TypedDict, total=False):
    """See the settings of these names."""

    id: str
    text: str
    columns: str | Sequence[str]
    missing_text: MissingText
    max_text_bytes: int
    bad_rows: BadRows


class FileColumnSettings(ColumnSettings, total=False):
    """Those of files."""

    encoding: str
    escape: str | None


def column_names(names: str | Sequence[str]) -> list[str]:
    """Return the names of a list, or of a string with commas between them."""
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return list(names)


def selected(selection: Selection | None, settings: Mapping[str, Any]) -> Selection:
    """Return the given selection, or the one that the settings describe."""
    if selection is not None and settings:
        raise TypeError(
            f"give either a selection or settings; both were given: {', '.join(settings)}"
        )
    if selection is not None:
        return selection
    others = dict(settings)
    carried = column_names(others.pop("columns", ()))
    return Selection(carried=tuple(carried), **others)
