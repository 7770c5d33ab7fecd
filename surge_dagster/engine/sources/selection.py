"""Which columns of a source become ids and texts, and which travel with them into the output."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict
from urllib.parse import urlencode

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.bad_rows import FirstIds
from surge_dagster.engine.sources.template import Template

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
    # The fields above are the repr, of which names of cached listings are made.
    carried: tuple[str, ...] = field(default=(), repr=False)
    encoding: str = "utf-8"
    escape: str | None = None
    bad_rows: BadRows = "refuse"
    passage: str | None = None
    template: Template | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_template = "{" in self.text or "}" in self.text
        object.__setattr__(self, "template", Template.compile(self.text) if is_template else None)
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
        if self.template is not None:
            names = [name for _, name in self.template.parts if name is not None]
        if names.count(column) != 1:
            raise ConfigError(
                f"the column {column!r} cannot be cut into chunks: expected a column that the text "
                f"{self.text!r} has once. Name one of {', '.join(dict.fromkeys(names))}."
            )

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        return list(dict.fromkeys((self.id, *self.text_columns, *self.carried)))

    @property
    def text_columns(self) -> Sequence[str]:
        """The columns of which the text is made."""
        return (self.text,) if self.template is None else self.template.columns

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
        if self.template is not None:
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
