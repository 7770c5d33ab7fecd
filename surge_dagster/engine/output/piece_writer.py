"""One piece of an encoded SuperBatch becomes a file: looked at, compared with what it replaces, serialized, published.

A piece is a partition, or a segment of a split one, which is staged as an object of its own.
"""

from __future__ import annotations

import time

import numpy as np

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.file_formats import write_file
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.output.drift import Comparisons
from surge_dagster.engine.output.publication import Publication, Spent
from surge_dagster.engine.output.receipts import receipt_of, require_unchanged
from surge_dagster.engine.output.space_target import SpaceTarget
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.report import Receipt
from surge_dagster.engine.superbatch import Segment, StagedRows
from surge_dagster.engine.support.ledger import Ledger


class PieceWriter:
    """Writes pieces; used by all publishing threads.

    Args:
        target: where to.
        staging: where segments of split partitions wait for the others.
        ledger: booked with what a comparison with an old file takes.
    """

    def __init__(self, target: SpaceTarget, staging: Staging, ledger: Ledger) -> None:
        self._target = target
        self._staging = staging
        self.drift = Comparisons(target.store, target.space, ledger)

    def publish(self, publication: Publication, segment: Segment) -> tuple[Receipt, Spent]:
        """Write the file of a partition that lies whole in its SuperBatch.

        Raises:
            DataError: a vector of it is no embedding.
            SurgeError, OSError: it cannot be written, or is no longer wanted.
        """
        partition, slot = segment.partition, publication.batch.slot
        begun = time.perf_counter()
        matrix = self._sound_vectors(publication, segment)
        truncated = slot.truncated(segment.start, segment.stop)
        facts = self._target.facts(partition, rows=len(matrix), truncated=truncated)
        self._compare(publication, segment, matrix)
        with self._target.create(partition.key) as upload:
            rows = self._target.rows(publication.batch, segment, matrix)
            write_file(self._target.space.file_format, upload, rows, facts)
            serialized = time.perf_counter()
            stored = upload.publish(lambda: require_unchanged(partition.source))
        spent = Spent(begun, serialized, time.perf_counter(), truncated)
        receipt = receipt_of(
            facts,
            stored,
            self._target.store.location(stored.name),
            superbatch=publication.batch.index,
            texts_per_second=publication.texts_per_second,
            drift=self.drift.take(partition.key),
        )
        return receipt, spent

    def stage(self, publication: Publication, segment: Segment) -> tuple[StagedRows, Spent]:
        """Write a segment of a split partition aside.

        Raises:
            DataError: a vector of it is no embedding.
            SurgeError, OSError: it cannot be written.
        """
        slot = publication.batch.slot
        begun = time.perf_counter()
        matrix = self._sound_vectors(publication, segment)
        truncated = slot.truncated(segment.start, segment.stop)
        self._compare(publication, segment, matrix)
        checked = time.perf_counter()
        staged = self._staging.write(
            segment.partition,
            segment.first_row,
            segment.ids,
            slot.texts(segment.start, segment.stop),
            matrix,
            truncated=truncated,
        )
        return staged, Spent(begun, checked, time.perf_counter(), truncated)

    def _compare(self, publication: Publication, segment: Segment, matrix: np.ndarray) -> None:
        """Compare a segment with the file that is about to be replaced, where its partition was drawn for that."""
        partition = segment.partition
        if partition.replaces is not None and segment.start < segment.stop:
            texts = publication.batch.slot.texts(segment.start, segment.stop)
            self.drift.add(partition.key, partition.replaces, segment.ids, texts, matrix)

    def _sound_vectors(self, publication: Publication, segment: Segment) -> np.ndarray:
        """A segment's vectors, [rows, dimension]; refuses its partition if one of them is no embedding."""
        failed = publication.encoded.failed_row(segment.start, segment.stop)
        if failed is not None:
            raise DataError(
                segment.partition.key,
                f"its text ends every worker that encodes it ({failed.reason})",
                "Look at this text, shorten it or take it out, and run again.",
                segment.first_row + failed.row - segment.start,
            )
        matrix = publication.batch.slot.matrix(segment.start, segment.stop)
        wrong = invalid_row(matrix, normalized=self._target.space.normalize)
        if wrong is not None:
            raise DataError(
                segment.partition.key,
                f"{wrong[1]}: the encoder gave what cannot be published",
                "Look at the text of this row; if it is ordinary, the model or the device is at fault.",
                segment.first_row + wrong[0],
            )
        return matrix
