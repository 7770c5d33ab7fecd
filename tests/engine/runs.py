"""Helpers that make a whole run, and the conditions that hold after each run."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall, EncodeMetrics
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.run import thresholds as thresholds_module
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.superbatch import ReadPartition
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import ContentDigest, Partition
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import wait_in_turns
from surge_dagster.engine.verify.verification import Violation, verify
from tests.small_catalogs import (
    Embedded,
    Rows,
    assert_embedded,
    partition_of,
    published_files,
    read_embedded,
    row_batch_of,
)

SMALL = Thresholds(b_min=50, b_max=100)
T = TypeVar("T")
THREADS = ("surge-run", "surge-read", "surge-publish")


def make_run(
    pool: Any,
    partitions: Iterable[Partition],
    output: Path | Store,
    thresholds: Thresholds = SMALL,
    *,
    changes: bool = False,
    **options: Any,
) -> EmbeddingRun:
    """A run that is ready to start.

    Args:
        pool: may be a wrapper around a pool.
        changes: write change files even if no consumer is registered.
    """
    store = open_store(output) if isinstance(output, Path) else output
    options.setdefault("change_feed", ChangeFeed(always=changes))
    return EmbeddingRun(partitions, store, pool, thresholds, **options)


class Output:
    """An output of runs with one pool, and what lies in it."""

    def __init__(self, pool: Any, root: Path, store: Store | None = None) -> None:
        self.pool = pool
        self.root = root
        self.space: str = pool.space.name
        self.store = store or open_store(root)

    def run(
        self,
        partitions: Iterable[Partition],
        thresholds: Thresholds = SMALL,
        *,
        pool: Any = None,
        store: Store | None = None,
        **options: Any,
    ) -> EmbeddingRun:
        """A run that is ready to start.

        Args:
            pool: a wrapper around the pool.
            store: another store of the same folder.
        """
        return make_run(pool or self.pool, partitions, store or self.store, thresholds, **options)

    def embed(self, *arguments: Any, **options: Any) -> EmbeddingRun:
        """A run that went through as in `finish`."""
        return completed(self.run(*arguments, **options))

    def events(self, *arguments: Any, **options: Any) -> list[Any]:
        """All events of such a run."""
        return finish(self.run(*arguments, **options))

    def failure(self, *arguments: Any, **options: Any) -> Failure:
        """The only failure of such a run."""
        [failure] = failures(self.events(*arguments, **options))
        return failure

    def violations(self, source: Any, **options: Any) -> list[Violation]:
        """What a verification finds."""
        return of_kind(verify(source, self.store, self.pool.space, **options), Violation)

    def keys(self) -> set[str]:
        """The keys of the published files, and the whole names of all else."""
        found = published_files(self.root, self.space)
        return {name.removesuffix(".parquet") for name in found}

    def path(self, key: str) -> Path:
        """A partition's file."""
        return self.root / file_name(self.space, key)

    def read(self, key: str) -> Embedded:
        """What a reader finds in a partition's file."""
        return read_embedded(self.root, self.space, key)

    def check(self, key: str, rows: Rows) -> FileFacts:
        """Row i of the file is row i of the source, with its own vector."""
        return assert_embedded(self.root, self.space, key, rows)

    def check_all(self, catalog: Mapping[str, Rows]) -> None:
        """Check each partition of a catalog."""
        for key, rows in catalog.items():
            self.check(key, rows)


def finish(run: EmbeddingRun) -> list[Any]:
    """All events of a run; checks that the run has released everything that it held."""
    events = list(run.events())
    assert_nothing_is_held(run)
    return events


def completed(run: EmbeddingRun) -> EmbeddingRun:
    """The run, after it went through as in `finish`."""
    finish(run)
    return run


def finish_receipts(run: EmbeddingRun, *actions: str) -> list[Receipt]:
    """The receipts of a whole run, of these actions or of all."""
    return receipts(finish(run), *actions)


def assert_nothing_is_held(run: EmbeddingRun) -> None:
    """The ledger is at zero, no text is in flight and no thread runs."""
    if run.report.b_min:  # otherwise nothing was encoded
        ledger = run.memory.ledger
        assert ledger.held == 0
        assert run.memory.in_flight.texts == 0
        assert ledger.peak <= ledger.limit
    busy = [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    assert not busy


def busy_threads() -> set[threading.Thread]:
    """Threads but for those that only wait for further work in the background."""
    return {thread for thread in threading.enumerate() if thread.name != "surge-idle"}


def wait_for_publishing_threads() -> None:
    """Until no thread is busy with a run; those that only wait for more work have another name."""

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return not any(thread.name.startswith(THREADS) for thread in threading.enumerate())

    assert wait_in_turns(wait, 60)


def receipts(events: Iterable[Any], *actions: str) -> list[Receipt]:
    """Receipts among events, of these actions or of all."""
    return [
        event
        for event in events
        if isinstance(event, Receipt) and event.action in (actions or (event.action,))
    ]


def read_of(rows: Rows) -> ReadPartition:
    """What is known of a partition with these rows once it was read."""
    digest = ContentDigest()
    digest.update(row_batch_of(rows))
    return ReadPartition(len(rows), digest.hexdigest(), pa.string())


def of_kind(events: Iterable[Any], kind: type[T]) -> list[T]:
    """Those events that are of this kind."""
    return [event for event in events if isinstance(event, kind)]


def failures(events: Iterable[Any]) -> list[Failure]:
    """Failures among events."""
    return of_kind(events, Failure)


def in_memory(catalog: Mapping[str, Rows], version: str = "v1") -> Iterator[Partition]:
    """Partitions in memory, in the given order."""
    for key, rows in catalog.items():
        yield partition_of(key, rows, version=version)


class Wrapped:
    """Stands in for a pool, a store or a call; a subclass changes some of its methods."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class UnstartedPool:
    """A pool that must not be started."""

    def __init__(self, pool: EncoderPool) -> None:
        self.require_documents = pool.require_documents
        self.space = pool.space

    def start(self) -> None:
        raise AssertionError("the pool was started")


class HeldCall(Wrapped):
    """An encode call whose result is held back until a gate opens."""

    def __init__(self, call: EncodeCall, gate: threading.Event) -> None:
        super().__init__(call)
        self._gate = gate

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """The metrics, once the gate is open."""
        return self.inner.result() if self._gate.wait(timeout_seconds) else None


class DoorPool(Wrapped):
    """A pool that calls `waiting` each time a thread that waits for a slot checks for
    cancellation."""

    def __init__(self, pool: EncoderPool, waiting: Callable[[], None]) -> None:
        super().__init__(pool)
        self._waiting = waiting

    def arena(self, **size: int) -> Arena:
        """An arena that calls `waiting` while a thread waits for a slot."""
        arena = self.inner.arena(**size)
        acquire = arena.acquire

        def watched(cancelled: Callable[[], bool] | None = None) -> Slot:
            def look() -> bool:
                self._waiting()
                return cancelled is not None and cancelled()

            return acquire(look)

        arena.acquire = watched
        return arena


def limit_bytes(patch: pytest.MonkeyPatch, b_max_bytes: int) -> None:
    """Derive SuperBatches of at most so many bytes of ids and texts, however many texts they may
    have."""
    for constant in ("_LEAST_B_MAX_BYTES", "_SCALED_B_MAX_BYTES"):
        patch.setattr(thresholds_module, constant, b_max_bytes)
    patch.setattr(thresholds_module, "_BYTES_PER_TEXT", 0)


def smallest_run_limit(output: Output, thresholds: Thresholds = SMALL, **options: Any) -> int:
    """The smallest limit that a run with these thresholds accepts."""
    partition = partition_of("k", [])
    return smallest_limit(
        lambda limit: output.run([partition], thresholds, memory_limit_bytes=limit, **options)
    )


def smallest_limit(refused: Callable[[int], Any]) -> int:
    """The limit that the refusal of a smaller one names.

    Args:
        refused: called with a limit of one byte; a run that it returns is iterated.
    """
    with pytest.raises(ConfigError, match="the smallest that works is") as error:
        list(refused(1))
    found = re.search(r"the smallest that works is ([\d,]+)", str(error.value))
    assert found
    return int(found[1].replace(",", ""))
