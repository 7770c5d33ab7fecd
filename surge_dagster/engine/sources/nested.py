"""Columns inside of structs: `doc.title` is the field `title` of the column `doc`, where no column
has that name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa


def names_with_fields(fields: Iterable[pa.Field]) -> list[str]:
    """The names of columns, then those of the fields inside of them."""
    fields = list(fields)
    names, structs = (
        [field.name for field in fields],
        [field for field in fields if pa.types.is_struct(field.type)],
    )
    inner = (
        f"{struct.name}.{name}"
        for struct in structs
        for name in names_with_fields(struct.type.fields)
    )
    return [*names, *(name for name in dict.fromkeys(inner) if name not in names)]


def outer_columns(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Which of these names are the columns, or may have them inside."""
    inner = [column for column in columns if column not in names]
    return [
        name
        for name in names
        if name in columns or any(each.startswith(f"{name}.") for each in inner)
    ]


def select(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """The batch with these columns alone, in this order, each as a column of its own."""
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    return pa.RecordBatch.from_arrays([_inside(arrays, name) for name in columns], list(columns))


def nested_fields(types: Mapping[tuple[str, ...], pa.DataType]) -> list[pa.Field]:
    """The fields that have values of these types, by their path."""
    fields = dict[str, dict[tuple[str, ...], pa.DataType]]()
    for (name, *path), kind in types.items():
        fields.setdefault(name, {})[tuple(path)] = kind
    return [
        pa.field(name, inner.get(()) or pa.struct(nested_fields(inner)))
        for name, inner in fields.items()
    ]


def _inside(arrays: Mapping[str, pa.Array], name: str) -> pa.Array | None:
    if name in arrays:
        return arrays[name]
    for outer, column in arrays.items():
        if name.startswith(f"{outer}.") and isinstance(column, pa.StructArray):
            fields = zip(
                (field.name for field in column.type.fields), column.flatten(), strict=True
            )
            if (found := _inside(dict(fields), name[len(outer) + 1 :])) is not None:
                return found
    return None
