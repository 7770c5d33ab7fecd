"""Derived spaces: fewer dimensions or smaller types, computed from float32 files without a model.

A derived space has a file for each file of its parent: the same rows, other vectors. A file is
fresh if it names the rows (`rows_version`) and the source version of the parent's file. Several
files are converted concurrently, a row group at a time.

The ranges of int8 are measured once over all vectors of the parent, and are part of the space.
Later values beyond them are clipped; `engine/compare` measures what is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import convert, cut
from surge_dagster.engine.derived.parent_files import (
    beside_parent,
    find_derived,
    find_ranges,
    parent_rows,
)
from surge_dagster.engine.errors import Cancelled, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import WRITER, desired_version
from surge_dagster.engine.files.formats import PublishedFile, file_name, usable_file
from surge_dagster.engine.files.rows import embedding_array, embedding_type, invalid_row, matrix_of
from surge_dagster.engine.model.spec import DerivedDtype, Space
from surge_dagster.engine.output.current_space import keep_current
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import claim_derived
from surge_dagster.engine.run.publication import write_rows
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.printable import first_line


@dataclass(slots=True)
class DeriveReport:
    """The metrics of one derivation.

    Attributes:
        partitions_removed: keys or file names whose files in the parent were removed.
        rows: written.
        convert_seconds: of the files; `wall_seconds` includes the calibration.
    """

    space: str
    parent: str
    dtype: str
    dimension: int
    partitions_written: int = 0
    partitions_fresh: int = 0
    partitions_failed: list[Failure] = field(default_factory=list)
    partitions_removed: list[str] = field(default_factory=list)
    rows: int = 0
    convert_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.convert_seconds if self.convert_seconds else 0.0

    def in_words(self) -> str:
        """Return the report for people in a line."""
        partitions = (
            f"{counted(self.partitions_written, 'partition')} written, "
            f"{self.partitions_fresh:,} up to date, {len(self.partitions_failed):,} failed"
        )
        if self.partitions_removed:
            partitions += f", {len(self.partitions_removed):,} removed from the parent"
        line = f"{partitions}; {counted(self.rows, 'row')} derived"
        if self.rows:
            line += f" in {self.convert_seconds:.1f} s ({self.rows_per_second:,.0f} rows/s)"
        return line

    def as_dict(self) -> dict[str, Any]:
        """Return the report as the command prints it in JSON."""
        failed = [{"key": each.key, "reason": each.reason} for each in self.partitions_failed]
        return asdict(self) | {
            "partitions_failed": failed,
            "rows_per_second": round(self.rows_per_second, 1),
        }


class DeriveRun:
    """Brings a derived space up to date with its parent; begins it if the output does not have it.

    Args:
        dimension: leading dimensions that are kept; None is all.
        removed: what to do with files whose parent's file was removed.

    Attributes:
        space: the derived space.
        report: the metrics, live.

    Raises:
        ConfigError: such a space cannot be derived, or the parent has no vectors for int8's ranges.
    """

    def __init__(
        self,
        store: Store,
        parent: Space,
        dtype: DerivedDtype = "float32",
        dimension: int | None = None,
        *,
        removed: Literal["report", "delete"] = "report",
        threads: int = min(4, os.cpu_count() or 1),
    ) -> None:
        self._begun = perf_counter()
        self._store = store
        self._parent = parent
        self._removed = removed
        self._threads = threads
        self._stop = threading.Event()
        wanted = parent.derive(dtype, dimension)
        space = find_derived(store, wanted)
        if space is None and dtype == "int8":
            ranges = find_ranges(store, parent, wanted, self._usable())
            space = parent.derive(dtype, dimension, ranges)
        space = space or wanted
        keep_current(store, space)
        claim_derived(store, space)
        self.space = space
        self.report = DeriveReport(space.name, parent.name, space.dtype, space.dimension)

    def events(self, keys: Iterable[str] | None = None) -> Generator[Receipt | Failure]:
        """Derive what is missing or stale; yield fresh partitions, then each published one.

        Args:
            keys: partitions to bring up to date; None is all, and then removed ones are found too.
        """
        report = self.report
        requested = None if keys is None else list(keys)
        outputs = OutputState(self._store, self.space.name)
        own = outputs.files(requested)
        # Listed last, so that no partition that is derived meanwhile seems removed.
        parents = OutputState(self._store, self._parent.name).files(requested)
        todo: list[PublishedFile] = []
        for judged in beside_parent(self._store, self._parent, parents, outputs):
            if not isinstance(judged, tuple):
                yield self._fail(judged)
                continue
            file, freshness = judged
            if freshness.status == "fresh" and freshness.file is not None:
                report.partitions_fresh += 1
                yield self._receipt(freshness.file, "fresh")
            else:
                todo.append(file)
        converting = perf_counter()
        for done in self._converted(todo):
            if isinstance(done, PublishedFile):
                report.partitions_written += 1
                report.rows += done.facts.rows
                yield self._receipt(done, "derived")
            else:
                yield self._fail(done)
        report.convert_seconds = perf_counter() - converting
        if requested is None:
            self._find_removed(outputs, own, parents)
        report.wall_seconds = perf_counter() - self._begun

    def _find_removed(
        self, outputs: OutputState, own: Mapping[str, Any], parents: Mapping[str, Any]
    ) -> None:
        for name, file in own.items():
            if self._parent.name + name.removeprefix(self.space.name) in parents:
                continue
            key = file.facts.partition_key if isinstance(file, PublishedFile) else name
            self.report.partitions_removed.append(key)
            if self._removed == "delete" and outputs.is_as_listed(name):
                self._store.delete(name)

    def _own_name(self, file: PublishedFile) -> str:
        return file_name(self.space.name, file.facts.partition_key)

    def _usable(self) -> list[PublishedFile]:
        usable = []
        for name, listed in OutputState(self._store, self._parent.name).files().items():
            with contextlib.suppress(DataError, TransientError):
                usable.append(usable_file(self._store, self._parent, name, listed))
        return usable

    def _converted(
        self, files: Iterable[PublishedFile]
    ) -> Iterator[PublishedFile | DataError | TransientError]:
        """Derive files in several threads; a file is durable before it is yielded."""
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="surge-derive")
        results = pool.map(self._derive, files)
        try:
            while done := list(itertools.islice(results, 8 * self._threads)):
                self._store.sync(self.space.name)
                yield from done
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)

    def _derive(self, file: PublishedFile) -> PublishedFile | DataError | TransientError:
        """Return the file of one partition or its error; a store that is down ends the run."""
        try:
            return self._write(file)
        except StoreUnavailable:
            raise
        except (DataError, TransientError) as error:
            error.key = error.key or file.facts.partition_key
            return error
        except OSError as error:
            key = file.facts.partition_key
            location = self._store.location(self._own_name(file))
            reason = f"{location!r} could not be written: {first_line(error)}"
            return TransientError(f"partition {key!r}: {reason}. Run again.", key)

    def _write(self, file: PublishedFile) -> PublishedFile:
        space = self.space
        facts = replace(
            file.facts,
            space=space.name,
            desired_version=desired_version(file.facts.content_digest, space.name),
            dimension=space.dimension,
            writer=WRITER,
        )
        stored_type = embedding_type(space.dimension, space.dtype)
        vectors = pa.field("embedding", stored_type, nullable=False)
        columns = file.columns.set(file.columns.get_field_index("embedding"), vectors)
        with self._store.create(self._own_name(file)) as upload:
            write_rows(space, upload, columns, facts, self._rows(file, columns))
            return PublishedFile(upload.publish(lambda: None), facts, columns)

    def _wrong(self, vectors: np.ndarray, of_parent: np.ndarray) -> tuple[int, str] | None:
        return invalid_row(
            vectors,
            normalized=self.space.normalize,
            may_be_zero=lambda row: not of_parent[row].any(),
        )

    def _rows(self, file: PublishedFile, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a parent's file with derived vectors, in the derived file's columns."""
        space = self.space
        row = 0
        for batch in parent_rows(self._store, self._parent, file):
            if self._stop.is_set():
                raise Cancelled
            of_parent = matrix_of(batch)
            vectors = cut(of_parent, space)
            stored = convert(vectors, space)
            wrong = self._wrong(vectors, of_parent) or self._wrong(stored, of_parent)
            if wrong is not None:
                reason = f"{wrong[1]}, once it is converted to {space.dimension} {space.dtype}"
                remedy = "Keep more dimensions, or use float32."
                raise DataError(file.facts.partition_key, reason, remedy, row + wrong[0])
            arrays = batch.columns
            arrays[columns.get_field_index("embedding")] = embedding_array(columns, stored)
            yield pa.RecordBatch.from_arrays(arrays, schema=columns)
            row += len(batch)

    def _fail(self, error: DataError | TransientError) -> Failure:
        key = error.key or "?"
        remedy = error.remedy if isinstance(error, DataError) else "Run again."
        failure = Failure(
            key, str(error), isinstance(error, TransientError), remedy, in_source=False
        )
        self.report.partitions_failed.append(failure)
        return failure

    def _receipt(self, file: PublishedFile, action: Literal["derived", "fresh"]) -> Receipt:
        return Receipt.of(
            file.facts, file.stored, self._store.location(file.stored.name), action=action
        )
