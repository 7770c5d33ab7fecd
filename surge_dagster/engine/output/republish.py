"""A file whose source version moved while its content did not: written again under the new version, not encoded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from surge_dagster.engine.files.embedding_file import (
    READ_BYTES,
    STRING_COPIES,
    WRITER,
    InvalidFile,
    check_schema,
    rows_at_a_time,
)
from surge_dagster.engine.files.file_formats import new_writer, open_output_file
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.assembly import row_groups
from surge_dagster.engine.output.freshness import PublishedFile
from surge_dagster.engine.output.receipts import require_unchanged
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems


def republish(
    store: Store,
    published: PublishedFile,
    partition: Partition,
    space: Space,
    *,
    widest_row: int,
    held: Callable[[int], AbstractContextManager[None]],
) -> PublishedFile:
    """Copy a file's rows to a new one that names the partition's present source version.

    What is copied may have been replaced since it was looked at: the new file says what the one that is read says.

    Args:
        widest_row: most bytes of id and text that a row has.
        held: books what wide rows take at once, in bytes; what others take is the caller's to book.

    Raises:
        InvalidFile: the file is damaged, or has other content by now; it is left as it is.
        TransientError: the new one cannot be written, or the source has changed once more.
        OSError: the system does not give the old one, of which nothing is known then.
    """
    name = published.stored.name
    try:
        with (
            store.open(name) as source,
            open_output_file(source, space.file_format, buffer_size=READ_BYTES) as reader,
            held(reader.reading_bytes(widest_row) + (1 + STRING_COPIES) * widest_row),
            store.create(name) as upload,
        ):
            if reader.facts.desired_version != published.facts.desired_version:
                raise InvalidFile("it was replaced by one with other content since it was looked at")
            facts = replace(reader.facts, source_version=partition.source_version, writer=WRITER)
            columns = reader.schema
            check_schema(columns, dimension=space.dimension, dtype=space.dtype)
            with new_writer(
                space.file_format,
                upload.sink,
                columns.field("id").type,
                space.dimension,
                space.dtype,
                include_text="text" in columns.names,
            ) as writer:
                rows = rows_at_a_time(widest_row, space.dimension, np.dtype(space.dtype).itemsize)
                for group in row_groups(reader.read(batch_rows=rows), writer, space):
                    writer.append_table(group)
                if writer.rows != facts.rows:
                    raise InvalidFile(f"{writer.rows:,} rows could be read of {facts.rows:,}")
                writer.close(facts)
            stored = upload.publish(lambda: require_unchanged(partition))
    except UNREADABLE as error:
        if is_systems(error) and not isinstance(error, FileNotFoundError):
            raise
        raise InvalidFile(f"it cannot be read ({first_line(error)})") from error
    store.sync(space.name)
    return PublishedFile(stored, facts)
