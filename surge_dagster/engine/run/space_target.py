"""Where the files of a run go, and what all of them have in common."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.facts import FileFacts, VectorFacts, desired_version
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.rows import FileRows, in_words, schema
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.superbatch import PartitionToRead, ReadPartition, Segment, SuperBatch
from surge_dagster.engine.store.store import Store, Upload
from surge_dagster.engine.support.text_hash import text_hashes


@dataclass(frozen=True, slots=True)
class SpaceTarget:
    """A space of an output, as one run writes it: with which precision, and whether files have a
    text column."""

    store: Store
    space: Space
    precision: str
    include_text: bool

    def create(self, key: str) -> Upload:
        return self.store.create(file_name(self.space.name, key))

    def sync(self) -> None:
        """Flush the space's folder: files published before are durable afterwards."""
        self.store.sync(self.space.name)

    def rows(self, batch: SuperBatch, segment: Segment, matrix: np.ndarray) -> FileRows:
        """Return a segment with its vectors [rows, dimension] as rows of a file."""
        texts = batch.slot.texts(segment.start, segment.stop)
        return FileRows(
            segment.ids,
            segment.id_type,
            texts if self.include_text else None,
            text_hashes(texts),
            matrix,
            segment.carried,
            segment.carried_columns,
            batch.slot.truncation(segment.start, segment.stop),
        )

    def columns(self, id_type: pa.DataType, carried: pa.Schema | None) -> pa.Schema:
        return schema(
            id_type,
            self.space.dimension,
            self.space.dtype,
            include_text=self.include_text,
            carried=carried,
        )

    def facts(
        self, partition: PartitionToRead, read: ReadPartition, vectors: VectorFacts
    ) -> FileFacts:
        rows_version = secrets.token_hex(16)
        columns = self.columns(read.id_type, read.carried_columns)
        if partition.has_same_rows(read.content_digest, vectors, columns):
            rows_version = partition.old_rows_version
        return FileFacts(
            partition_key=partition.key,
            space=self.space.name,
            model=self.space.requested.model,
            precision=self.precision,
            source_version=partition.source.source_version,
            content_digest=read.content_digest,
            desired_version=desired_version(read.content_digest, self.space.name),
            rows=read.rows,
            dimension=self.space.dimension,
            rows_version=rows_version,
            carried_columns=in_words(read.carried_columns),
            skipped_rows=read.skipped_rows,
            blank_texts=read.blank_texts,
            **asdict(vectors),
        )
