"""Files are read back beside their sources before they are called materialized.

A footer says what a file shall hold, and not whether it does. On a disk that is read in the thread that asks. In a
bucket each read waits for several answers, so many files are read at once: one after the other, a run would tell of
some twenty a second, however fast it publishes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.report import Failure
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import wait_in_turns
from surge_dagster.engine.verify import Violation, verify

Found = Failure | TransientError | None

_AT_ONCE = 16
_UNDER_WAY = 2 * _AT_ONCE
# Of files that are read together: what is resident does not grow with them, and those that were begun come to an end.
_BYTES_UNDER_WAY = 32 * 1024 * 1024
_ENCODE_AGAIN = "Run again: it is encoded again."


class ReadBack:
    """Reads files of one space back; use `with`, which waits for those that are under way unless an error ends it.

    Args:
        store, space: where the files are.
        until: on the monotonic clock, when those of a bucket that are under way are given up; None is never.
    """

    def __init__(self, store: Store, space: Space, until: float | None = None) -> None:
        self._over = threading.Event()
        self._store = store.until(self._over)
        self._space = space
        self._until = until
        self._changed = threading.Condition()
        self._under_way = 0
        self._bytes = 0
        self._error: BaseException | None = None
        self._telling = threading.Lock()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0

    def look(self, partition: Partition, size: int, tell: Callable[[Found], None]) -> None:
        """Read a partition's file; waits for room where many are under way, and does nothing when there is no time.

        Args:
            size: of the file, in bytes.
            tell: called with what is wrong with the file, or with why it cannot be read now; None is neither. It is
                called by one thread at a time, not always by this one.

        Raises:
            StoreUnavailable: the store is down, as this read or an earlier one has found.
            BaseException: what telling of an earlier one raised.
        """
        if not self._store.is_remote:
            tell(self._found(partition))
            return
        if not self._wait(lambda: self._under_way < _UNDER_WAY and self._bytes + size <= _BYTES_UNDER_WAY):
            return
        with self._changed:
            self._under_way += 1
            self._bytes += size
        if self._threads < _AT_ONCE:
            self._threads += 1
            # No process that is to end waits for a daemon's answer from the bucket.
            threading.Thread(target=self._run, name="surge-read-back", daemon=True).start()
        self._waiting.put(lambda: self._look(partition, size, tell))

    def require_going_on(self) -> None:
        """Raise what ended an earlier read, if anything did."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait(lambda: False)
        finally:
            self._over.set()
            for _ in range(self._threads):
                self._waiting.put(None)

    def _wait(self, enough: Callable[[], bool]) -> bool:
        """Wait until nothing is under way, or only so little; whether that was in time."""
        with self._changed:
            left = None if self._until is None else self._until - time.monotonic()
            done = wait_in_turns(
                lambda turn: self._changed.wait_for(
                    lambda: not self._under_way or enough() or self._error is not None, turn
                ),
                left,
            )
            self.require_going_on()
            return done

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()

    def _look(self, partition: Partition, size: int, tell: Callable[[Found], None]) -> None:
        try:
            if not self._over.is_set():
                found = self._found(replace(partition, read=lambda: self._rows(partition)))
                with self._telling:
                    if not self._over.is_set():
                        tell(found)
        except Cancelled:
            pass  # nobody waits for it any more
        except BaseException as error:  # the thread would keep it to itself
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._under_way -= 1
                self._bytes -= size
                self._changed.notify_all()

    def _rows(self, partition: Partition) -> Iterator[RowBatch]:
        for batch in partition.read():
            if self._over.is_set():
                raise Cancelled
            yield batch

    def _found(self, partition: Partition) -> Found:
        try:
            return file_failure(partition, self._store, self._space)
        except StoreUnavailable:
            raise  # of every file, and each would wait for it anew
        except TransientError as error:
            return error


def file_failure(partition: Partition, store: Store, space: Space) -> Failure | None:
    """Why a partition's file is not what its source says it must be, row by row; None when it is.

    A file that another attempt at encoding will replace is a transient failure; a source whose rows are refused is
    not. A source that has changed since it was listed proves nothing: the next look will see to that.

    Raises:
        TransientError: the source or the output does not answer.
    """
    found = next(iter(verify(_Alone(store.url, partition), store, space)))  # further ones would be of other files
    if not isinstance(found, Violation) or partition.current_source_version() != partition.source_version:
        return None
    if found.kind == "unread":
        raise TransientError(found.finding, partition.key)
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
