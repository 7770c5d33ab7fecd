"""Where the files of a run go, and what all of them have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.embedding_file import FileFacts, FileRows, desired_version
from surge_dagster.engine.files.file_formats import file_name
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store, Upload
from surge_dagster.engine.superbatch import OpenPartition, Segment, SuperBatch


@dataclass(frozen=True, slots=True)
class SpaceTarget:
    """A space of an output, as one run writes it.

    Attributes:
        store, space: where to.
        precision: recorded in each file.
        include_text: whether files have a text column.
    """

    store: Store
    space: Space
    precision: str
    include_text: bool

    def create(self, key: str) -> Upload:
        """Begin the file of a partition."""
        return self.store.create(file_name(self.space.name, key, self.space.file_format))

    def texts(self, batch: SuperBatch, start: int, stop: int) -> pa.LargeStringArray | None:
        """The texts of a SuperBatch's rows start..stop where files have them, without a copy."""
        return batch.slot.texts(start, stop) if self.include_text else None

    def rows(self, batch: SuperBatch, segment: Segment, matrix: np.ndarray) -> FileRows:
        """A segment of a SuperBatch as rows of a file; `matrix` has its vectors, [rows, dimension]."""
        id_type = segment.partition.id_type or pa.string()
        return FileRows(segment.ids, id_type, self.texts(batch, segment.start, segment.stop), matrix)

    def facts(self, partition: OpenPartition, *, rows: int, truncated: int) -> FileFacts:
        """What the file of a partition that was read to its end says of itself."""
        if partition.content_digest is None:
            raise RuntimeError(f"partition {partition.key!r} reached its end without a content digest")
        return FileFacts(
            partition_key=partition.key,
            space=self.space.name,
            model=self.space.requested.model,
            precision=self.precision,
            source_version=partition.source.source_version,
            content_digest=partition.content_digest,
            desired_version=desired_version(partition.content_digest, self.space.name),
            rows=rows,
            dimension=self.space.dimension,
            truncated=truncated,
        )
