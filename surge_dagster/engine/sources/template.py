"""Texts that are put together from several columns, such as "{title}. {description}".

Strings, numbers, booleans and times take part, written as Arrow casts them to strings. A null is an
empty part, and a row of nothing but nulls has no text. The length of every text is known before it
is built, so that neither a text nor a batch of texts can be larger than what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources.rows import is_blank, null_where, overlong, without_dictionary
from surge_dagster.engine.support.columns import value_lengths

_JOINED_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Template:
    """The columns that a template names, each once, and its literal texts with the name behind
    each, if any."""

    columns: tuple[str, ...]
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    @lru_cache(maxsize=64)
    def compile(cls, text: str) -> Self:
        """Compile a text with columns in braces; `{{` and `}}` stand for a brace."""
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(
                f"the text template {text!r} is not complete ({error}); expected columns in braces, as in "
                '"{title}. {description}", and {{ for a brace'
            ) from None
        names = [name for _, name, _, _ in parsed if name is not None]
        if not all(names) or any(spec or conversion for _, _, spec, conversion in parsed):
            raise ConfigError(
                f"the text template {text!r} has more or less than the name of a column in its braces"
            )
        if not names:
            raise ConfigError(
                f"the text template {text!r} names no column; expected one in braces, as in {{title}}"
            )
        return cls(
            tuple(dict.fromkeys(names)), tuple((literal, name) for literal, name, _, _ in parsed)
        )

    def texts(
        self,
        key: str,
        batch: pa.RecordBatch,
        first_row: int,
        max_text_bytes: int,
        *,
        blank_is_null: bool = False,
    ) -> Iterator[tuple[slice, pa.Array]]:
        """The texts of a batch in order, as large_string arrays of a few megabytes with the rows
        that they belong to.

        With `blank_is_null`, a row whose values are all null or blank has no text.
        """
        strings = {name: _as_strings(key, name, batch.column(name)) for name in self.columns}
        lengths = np.full(
            len(batch), sum(len(literal.encode()) for literal, _ in self.parts), np.int64
        )
        for _, name in self.parts:
            if name is not None:
                lengths += value_lengths(strings[name])
        if lengths.max(initial=0) > max_text_bytes:
            offset = int(np.argmax(lengths > max_text_bytes))
            raise overlong(key, int(lengths[offset]), max_text_bytes, first_row + offset)
        if blank_is_null:
            is_null = np.logical_and.reduce([is_blank(column) for column in strings.values()])
        else:
            nulls = (batch.column(name).is_null() for name in self.columns)
            is_null = np.logical_and.reduce([each.to_numpy(zero_copy_only=False) for each in nulls])
        ends = np.cumsum(lengths)
        start = 0
        while start < len(batch) or start == 0:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + _JOINED_BYTES, side="right")))
            rows = slice(start, min(stop, len(batch)))
            yield (
                rows,
                self._joined(
                    {name: column[rows] for name, column in strings.items()}, is_null[rows]
                ),
            )
            start = stop

    def _joined(self, strings: dict[str, pa.Array], is_null: np.ndarray) -> pa.Array:
        pieces: list[Any] = []
        for literal, name in self.parts:
            pieces += [pa.scalar(literal, pa.large_string())] if literal else []
            pieces += [strings[name]] if name is not None else []
        # made here: it imports pandas, which takes a second
        nothing = pa.scalar("", pa.large_string())
        joined = pc.binary_join_element_wise(*pieces, nothing)  # pyright: ignore[reportAttributeAccessIssue]
        return null_where(is_null, joined)


def _as_strings(key: str, name: str, column: pa.Array) -> pa.Array:
    """A column as large_string without nulls."""
    plain = without_dictionary(column)
    kind = plain.type
    try:
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_nested(kind):
            raise pa.ArrowNotImplementedError
        return pc.fill_null(plain.cast(pa.large_string()), "")
    except pa.ArrowNotImplementedError:
        raise DataError(
            key,
            f"the column {name!r} has type {kind}; a text is put together from strings, numbers, booleans and times",
            "Cast it to a string in the source, or take it out of the template.",
        ) from None
