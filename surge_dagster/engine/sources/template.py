"""Texts that are put together from several columns, such as "{title}. {description}".

Strings, numbers, booleans and times can be used, as Arrow casts them to strings. A null is an empty
part, and a row of nulls has no text.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.casting import UnfitValue, as_strings, plain_column
from surge_dagster.engine.sources.rows import is_blank, null_where


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
        self, key: str, batch: pa.RecordBatch, first_row: int, *, blank_is_null: bool = False
    ) -> pa.Array:
        """Return the texts of a batch; null if the values of a row are all null, or with
        `blank_is_null` all blank."""
        strings: dict[str, pa.Array] = {}
        for name in self.columns:
            try:
                values = as_strings(plain_column(batch.column(name)))
            except UnfitValue as error:
                rows = range(first_row, first_row + len(batch))
                raise error.refused(key, name, rows) from error
            strings[name] = values.fill_null("")
        is_null = np.ones(len(batch), np.bool_)
        for name, column in strings.items():
            nulls = batch.column(name).is_null().to_numpy(zero_copy_only=False)
            is_null &= is_blank(column) if blank_is_null else nulls
        pieces: list[Any] = []
        for literal, name in self.parts:
            if literal:
                pieces.append(pa.scalar(literal, pa.large_string()))
            if name is not None:
                pieces.append(strings[name])
        separator = pa.scalar("", pa.large_string())
        joined = pc.binary_join_element_wise(*pieces, separator)  # pyright: ignore[reportAttributeAccessIssue]
        return null_where(is_null, joined)


def _unusable(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the text template {text!r} {reason}; expected columns in braces, as in "
        '"{title}. {description}", and {{ for a brace'
    )
