"""Files are read back beside their sources before they are called materialized.

A footer says what a file shall hold, and not whether it does. On a disk that is read in the thread that asks. In a
bucket each read waits for several answers, so many files are read at once: one after the other, a run would tell of
some twenty a second, however fast it publishes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.output.store import Store
from surge_dagster.engine.telemetry import Failure
from surge_dagster.engine.verify import Violation, verify

Found = Failure | TransientError | None

_AT_ONCE = 16
_WAITING = 2 * _AT_ONCE
_LARGE_BYTES = 32 * 1024 * 1024
_ENCODE_AGAIN = "Run again: it is encoded again."


class ReadBack:
    """Reads files of one space back; use `with`, which waits for those that are under way unless an error ends it.

    Args:
        store, space: where the files are.
    """

    def __init__(self, store: Store, space: Space) -> None:
        self._over = threading.Event()
        self._store = store.until(self._over)
        self._space = space
        self._pool = ThreadPoolExecutor(_AT_ONCE, "surge-read-back") if store.is_remote else None
        self._changed = threading.Condition()
        self._under_way = 0
        self._error: BaseException | None = None
        self._one_large = threading.Lock()
        self._telling = threading.Lock()

    def look(self, partition: Partition, size: int, tell: Callable[[Found], None]) -> None:
        """Read a partition's file; waits for room where many are under way.

        Args:
            size: of the file, in bytes. Of large ones one is read at a time, so that memory does not grow with them.
            tell: called with what is wrong with the file, or with why it cannot be read now; None is neither. It is
                called by one thread at a time, not always by this one.

        Raises:
            StoreUnavailable: the store is down, as this read or an earlier one has found.
            BaseException: what telling of an earlier one raised.
        """
        if self._pool is None:
            tell(self._found(partition))
            return
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < _WAITING or self._error is not None)
            self._require_going_on()
            self._under_way += 1
        self._pool.submit(self._look, partition, size, tell)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        try:
            if error is None:
                with self._changed:
                    self._changed.wait_for(lambda: not self._under_way or self._error is not None)
                    self._require_going_on()
        finally:
            self._over.set()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, partition: Partition, size: int, tell: Callable[[Found], None]) -> None:
        try:
            with self._one_large if size > _LARGE_BYTES else nullcontext():
                found = None if self._over.is_set() else self._found(partition)
            with self._telling:
                if not self._over.is_set():
                    tell(found)
        except BaseException as error:  # a thread pool would keep it to itself
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _found(self, partition: Partition) -> Found:
        try:
            return file_failure(partition, self._store, self._space)
        except StoreUnavailable:
            raise  # of every file, and each would wait for it anew
        except TransientError as error:
            return error

    def _require_going_on(self) -> None:
        if self._error is not None:
            raise self._error


def file_failure(partition: Partition, store: Store, space: Space) -> Failure | None:
    """Why a partition's file is not what its source says it must be, row by row; None when it is.

    A file that another attempt at encoding will replace is a transient failure; a source whose rows are refused is
    not. A source that has changed since it was listed proves nothing: the next look will see to that.

    Raises:
        TransientError: the output does not answer.
    """
    found = next(iter(verify(_Alone(store.url, partition), store, space)))  # further ones would be of other files
    if not isinstance(found, Violation) or partition.current_source_version() != partition.source_version:
        return None
    if found.kind == "source":
        return Failure(partition.key, found.reason, remedy=found.remedy)
    reason = f"partition {partition.key!r}: {found.finding} {_ENCODE_AGAIN}"
    return Failure(partition.key, reason, True, _ENCODE_AGAIN)


@dataclass(frozen=True, slots=True)
class _Alone:
    """A source of one partition."""

    url: str
    partition: Partition

    def __iter__(self) -> Iterator[Partition]:
        yield self.partition


def unanswered(key: str, error: TransientError) -> Failure:
    """A partition's failure where the store does not give its file now."""
    return Failure(key, str(error), transient=True)
