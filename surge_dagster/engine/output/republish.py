"""A file whose source version moved while its content did not: written again under the new version, not encoded."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.output.embedding_file import WRITER, EmbeddingFileWriter, InvalidFile, read_rows
from surge_dagster.engine.output.freshness import PublishedFile
from surge_dagster.engine.output.store import Store


def republish(store: Store, published: PublishedFile, partition: Partition, space: Space) -> PublishedFile:
    """Copy a file's rows to a new one that names the partition's present source version.

    Raises:
        DataError: the file is damaged.
        TransientError: it cannot be written.
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
            with EmbeddingFileWriter(
                upload.sink,
                columns.field("id").type,
                space.dimension,
                space.dtype,
                include_text="text" in columns.names,
            ) as writer:
                for batch in read_rows(reader, batch_rows=4096):
                    writer.append_table(pa.Table.from_batches([batch], schema=writer.schema))
                writer.close(facts)
            stored = upload.publish(lambda: None)
    except (InvalidFile, pa.ArrowException) as error:
        raise DataError(
            partition.key, f"its file {store.location(name)!r} is damaged: {error}", "Remove the file, then run again."
        ) from error
    store.sync(space.name)
    return PublishedFile(stored, facts)
