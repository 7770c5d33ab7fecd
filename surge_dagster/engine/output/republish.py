"""A file whose source version moved while its content did not: written again under the new version, not encoded."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.output.embedding_file import (
    WRITER,
    EmbeddingFileWriter,
    InvalidFile,
    check_schema,
    read_rows,
)
from surge_dagster.engine.output.freshness import PublishedFile
from surge_dagster.engine.output.receipts import require_unchanged
from surge_dagster.engine.output.store import Store
from surge_dagster.engine.unreadable import first_line


def republish(store: Store, published: PublishedFile, partition: Partition, space: Space) -> PublishedFile:
    """Copy a file's rows to a new one that names the partition's present source version.

    Raises:
        InvalidFile: the file is damaged; it is left as it is.
        TransientError: the new one cannot be written, or the source has changed once more.
    """
    name = published.stored.name
    facts = replace(published.facts, source_version=partition.source_version, writer=WRITER)
    try:
        with (
            store.open(name) as source,
            pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True) as reader,
            store.create(name) as upload,
        ):
            columns = reader.schema_arrow
            check_schema(columns, dimension=space.dimension, dtype=space.dtype)
            with EmbeddingFileWriter(
                upload.sink,
                columns.field("id").type,
                space.dimension,
                space.dtype,
                include_text="text" in columns.names,
            ) as writer:
                for batch in read_rows(reader, batch_rows=writer.row_group_rows // 4 or 1):
                    writer.append_table(pa.Table.from_batches([batch], schema=writer.schema))
                if writer.rows != facts.rows:
                    raise InvalidFile(f"{writer.rows:,} rows could be read of {facts.rows:,}")
                writer.close(facts)
            stored = upload.publish(lambda: require_unchanged(partition))
    except (FileNotFoundError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InvalidFile(f"it cannot be read ({first_line(error)})") from error
    store.sync(space.name)
    return PublishedFile(stored, facts)
