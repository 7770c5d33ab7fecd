"""Texts that are put together from several columns, such as "{title}. {description}".

Strings, numbers, booleans and times can be used, as Arrow casts them to strings. A null is an empty
part, and a row of nulls has no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.casting import (
    UnfitValue,
    as_strings,
    is_blank,
    null_where,
    plain_column,
)


@dataclass(frozen=True, slots=True)
class Template:
    """The columns of a template, each once, and its literal texts, each with the name after it."""

    columns: tuple[str, ...]
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def compile(cls, text: str) -> Self:
        """Compile a text with columns in braces; `{{` and `}}` stand for a brace."""
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise _unusable(text, f"is not complete ({error})") from None
        names: list[str] = []
        for _, name, spec, conversion in parsed:
            if name == "" or spec or conversion:
                raise _unusable(text, "has more or less than the name of a column in its braces")
            if name is not None:
                names.append(name)
        if not names:
            raise _unusable(text, "names no column")
        parts = tuple((literal, name) for literal, name, _, _ in parsed)
        return cls(tuple(dict.fromkeys(names)), parts)

    def texts(
        self, key: str, batch: pa.RecordBatch, rows: np.ndarray, *, blank_is_null: bool = False
    ) -> pa.Array:
        """Return the texts of a batch; null if the values of a row are all null, or with
        `blank_is_null` all blank."""
        strings = self._strings(key, batch, rows)
        is_null = np.ones(len(batch), np.bool_)
        for name, column in strings.items():
            nulls = batch.column(name).is_null().to_numpy(zero_copy_only=False)
            is_null &= is_blank(column) if blank_is_null else nulls
        return null_where(is_null, _joined(self.parts, strings))

    def passages(
        self, key: str, batch: pa.RecordBatch, rows: np.ndarray, column: str
    ) -> np.ndarray:
        """Return where the value of a column starts and ends in each text, in characters, int64
        [rows, 2]. It stands in the template once."""
        strings = self._strings(key, batch, rows)
        place = [name for _, name in self.parts].index(column)
        before = (*self.parts[:place], (self.parts[place][0], None))
        starts = _characters(_joined(before, strings))
        return np.stack([starts, starts + _characters(strings[column])], axis=1)

    def _strings(self, key: str, batch: pa.RecordBatch, rows: np.ndarray) -> dict[str, pa.Array]:
        """Return the values of each column as strings; empty ones for nulls."""
        strings: dict[str, pa.Array] = {}
        for name in self.columns:
            try:
                values = as_strings(plain_column(batch.column(name)))
            except UnfitValue as error:
                raise error.refused(key, name, rows) from error
            strings[name] = values.fill_null("")
        return strings


def _joined(parts: Iterable[tuple[str, str | None]], strings: Mapping[str, pa.Array]) -> pa.Array:
    empty = pa.scalar("", pa.large_string())
    rows = len(next(iter(strings.values())))
    pieces: list[Any] = [pa.repeat(empty, rows)]  # of literals only, Arrow makes one text
    for literal, name in parts:
        if literal:
            pieces.append(pa.scalar(literal, pa.large_string()))
        if name is not None:
            pieces.append(strings[name])
    return pc.binary_join_element_wise(*pieces, empty)  # pyright: ignore[reportAttributeAccessIssue]


def _characters(texts: pa.Array) -> np.ndarray:
    lengths = pc.utf8_length(texts)  # pyright: ignore[reportAttributeAccessIssue]
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def _unusable(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the text template {text!r} {reason}; expected columns in braces, as in "
        '"{title}. {description}", and {{ for a brace'
    )
