"""Arrow IPC files and streams as record batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from surge_dagster.engine.sources.batching import names_with_fields, outer_columns, select, small
from surge_dagster.engine.sources.file_read import FileRead

_BODY_BYTES = 256 * 1024 * 1024  # of a record batch, which Arrow reads as a whole
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow file or stream."""
    with request.file.open() as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(max(0, source.size() - len(_STREAM_END)))
        if not is_file and source.read(len(_STREAM_END)) != _STREAM_END:
            raise request.refused(
                "is not an Arrow file, or a stream that was cut off",
                "Write it again, then run again.",
            )

        source.seek(0)
        bounded = pa.PythonFile(_Bounded(source, request), mode="r")
        open_ipc = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = open_ipc(bounded).schema
        request.require_columns(names_with_fields(schema))
        yield request.empty(schema)

        bounded.seek(0)
        fields = [schema.names.index(name) for name in outer_columns(schema.names, request.columns)]
        reader: Any = open_ipc(bounded, options=pa.ipc.IpcReadOptions(included_fields=fields))
        read = reader
        if is_file:
            read = map(reader.get_batch, range(reader.num_record_batches))
        for batch in read:
            batch.validate(full=False)
            yield from small(select(batch, request.columns))


class _Bounded:
    """A file that refuses to read a huge record batch: Arrow's readers have no such limit."""

    def __init__(self, file: pa.NativeFile, request: FileRead) -> None:
        self._file = file
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int) -> bytes:
        if size > _BODY_BYTES:
            raise self._request.refused(
                f"has a record batch of {size:,} bytes; at most {_BODY_BYTES:,} are read at once",
                "Write batches of fewer rows, for example write_table(table, max_chunksize=65536).",
            )
        return self._file.read(size)
