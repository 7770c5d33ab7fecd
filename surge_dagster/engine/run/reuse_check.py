"""Whether a run may reuse vectors of old files: a sample of old rows is encoded again before the
first reuse.

A model or a device may give other vectors than it gave before, under the same name. A run draws one
row from each of up to 32 files of its space, encodes their texts and compares. If one vector
differs by more than the precision promises, the run takes no vectors from old files. Files without
a text column cannot be compared, and their vectors are reused. Rows that an earlier run staged are
used in any case.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import EncoderError, StoreUnavailable
from surge_dagster.engine.files.formats import open_published
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.run.old_rows import UNUSABLE
from surge_dagster.engine.run.report import OldVectorSample
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.superbatch import SpaceTarget
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines

log = logging.getLogger(__name__)

_MOST_FILES = 32
_MOST_TEXT_BYTES = 64 * 1024
_SEED = 1


@dataclass(frozen=True, slots=True)
class _OldRow:
    key: str
    text: str
    vector: np.ndarray


@dataclass(eq=False, slots=True)
class ReuseAnswer:
    """Whether old vectors may be reused; None until it is decided. Runs of one pool may share it.

    Attributes:
        lock: held while a run compares the sample.
    """

    allowed: bool | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReuseCheck:
    """Decides whether old vectors may be reused; used by the reader.

    Args:
        names: of the files of the space, sorted.
        report: takes the result of the comparison.
        answer: of runs that share it; the first one compares.
    """

    def __init__(
        self,
        names: Sequence[str],
        target: SpaceTarget,
        pool: EncoderPool,
        memory: RunMemory,
        report: Callable[[OldVectorSample], None],
        answer: ReuseAnswer,
    ) -> None:
        self._names = names
        self._target = target
        self._pool = pool
        self._memory = memory
        self._report = report
        self._random = random.Random(_SEED)
        self._answer = answer

    def allows_reuse(self) -> bool:
        """Return whether old vectors may be reused; the first call compares the sample."""
        answer = self._answer
        with answer.lock:
            if answer.allowed is None:
                with self._memory.held(self._memory.plan.reader):
                    answer.allowed = self._compare()
            return answer.allowed

    def _compare(self) -> bool:
        drawn = self._random.sample(self._names, min(_MOST_FILES, len(self._names)))
        rows = [row for name in drawn if (row := self._row_of(name)) is not None]
        if not rows:
            return True

        texts = pa.array([row.text for row in rows], pa.large_string())
        try:
            vectors = self._pool.vectors(texts)
        except EncoderError as error:
            log.warning(
                "no vectors of old files are reused, as a sample of them could not be compared: %s",
                error,
            )
            return False

        old_vectors = np.stack([row.vector for row in rows])
        found = zip((row.key for row in rows), cosines(vectors, old_vectors).tolist(), strict=True)
        sample = OldVectorSample(dict(found), LOWEST_COSINE[self._target.precision])
        self._report(sample)
        if sample.drifted:
            log.warning("%s", sample.message)
        return not sample.drifted

    def _row_of(self, name: str) -> _OldRow | None:
        """Return a row of a file; None if the file cannot be read or its rows cannot be
        compared."""
        try:
            with open_published(self._target.store, self._target.space, name) as reader:
                has_rows = "text" in reader.columns.names and reader.facts.rows
                if has_rows and reader.facts.precision == self._target.precision:
                    return self._row_in(reader)
        except StoreUnavailable:
            raise
        except UNUSABLE:  # the reader of its partition reports it
            pass
        return None

    def _row_in(self, reader: OutputFile) -> _OldRow | None:
        """Return the first row of a random row group; None if its text is too long."""
        group = self._random.randrange(reader.groups)
        row = next(reader.read(columns=["text", "embedding"], groups=[group], batch_rows=1))
        text = row.column("text")[0].as_py()
        if len(text.encode()) > _MOST_TEXT_BYTES:
            return None
        return _OldRow(reader.facts.partition_key, text, matrix_of(row)[0].copy())
