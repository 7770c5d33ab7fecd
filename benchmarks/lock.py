"""How long a run's own work holds the interpreter lock, and the texts per second that it reaches
with an encoder that computes nothing.

    python -m benchmarks.lock --texts 200000 --rows 10000000 --rounds 5

A thread that only spins takes the lock whenever it gets it. It is in one of three states: it has a
core, it waits for one, or it waits for the lock. The kernel counts the first two, so the rest is
the time for which the work next to it held the lock. The table's last row checks the method: texts
hashed one after the other always hold the lock, and have as much lock as processor time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow as pa

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    in_own_process,
    in_turns,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import drawn_texts
from benchmarks.sources import measure_sorted
from benchmarks.synthetic import build_synthetic_catalog
from surge_dagster import open_source
from surge_dagster.engine.run.old_values import OldValues
from surge_dagster.engine.sources.partition import IdSet, Source
from surge_dagster.engine.support.text_hash import HASH_BYTES, text_hashes

_TEXTS_PER_PARTITION = 20_000
_COMPARED = "hashing, one text after the other"


class SpinningThread(threading.Thread):
    """A thread that always wants the lock, on a core of its own.

    Attributes:
        locked_seconds: how long it waited for the lock, once it has ended.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.locked_seconds = 0.0
        self._is_spinning = threading.Event()
        self._is_ending = False
        self._cores = os.sched_getaffinity(0)

    def run(self) -> None:
        if len(self._cores) > 1:  # on the core of the work it would wait for the core instead
            os.sched_setaffinity(0, {max(self._cores)})
        before = _seconds_of_this_thread()
        self._is_spinning.set()
        while not self._is_ending:
            pass
        after = _seconds_of_this_thread()
        wall, *others = (end - begin for begin, end in zip(before, after, strict=True))
        self.locked_seconds = wall - sum(others)

    def __enter__(self) -> SpinningThread:
        if len(self._cores) > 1:
            os.sched_setaffinity(0, self._cores - {max(self._cores)})
        self.start()
        self._is_spinning.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ending = True
        self.join()
        os.sched_setaffinity(0, self._cores)


def _seconds_of_this_thread() -> tuple[float, float, float]:
    """Return the time, and how long this thread has had a core and has waited for one."""
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    with_core, waiting, _ = map(int, schedstat.read_text().split())
    return time.perf_counter(), with_core / 1e9, waiting / 1e9


def measure_lock(count: int, rounds: int, folder: Path) -> Document:
    """Return the microseconds of lock and of processor per text of each piece of work."""
    texts = drawn_texts(count)
    ids = pa.array(map("id-{:09d}".format, range(count)), pa.string())
    old_ids = OldValues(ids)
    partitions = max(1, count // _TEXTS_PER_PARTITION)
    build_synthetic_catalog(folder, texts=count, partitions=partitions)
    source = open_source(folder)
    works: dict[str, Callable[[], object]] = {
        "hashing": lambda: text_hashes(texts),
        "repeated ids": lambda: find_repeated(ids),
        "ids of an old file": lambda: old_ids.rows(ids),
        "reading": lambda: read(source),
        _COMPARED: lambda: list(hashes_one_by_one(texts)),
    }
    for work in works.values():
        work()  # imports what it needs

    sides = {name: partial(_per_text, work, count) for name, work in works.items()}
    measured = in_turns(sides, rounds)
    return {
        name: {
            "lock_us": median(lock for lock, _ in rounds_of),
            "processor_us": median(processor for _, processor in rounds_of),
        }
        for name, rounds_of in measured.items()
    }


def _per_text(work: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the microseconds of lock, and of processor of this thread, per text."""
    with SpinningThread() as spinning:
        begun = time.thread_time()
        work()
        processor = time.thread_time() - begun
    return spinning.locked_seconds / count * 1e6, processor / count * 1e6


def find_repeated(ids: pa.Array) -> None:
    """Look for repeated ids in batches, as the reader does."""
    known = IdSet()
    for start in range(0, len(ids), 8192):
        known.add(ids[start : start + 8192])
    known.repeated()


def read(source: Source) -> int:
    """Read all partitions, and count their rows."""
    return sum(len(batch) for partition in source for batch in partition.read())


def hashes_one_by_one(texts: pa.Array) -> Iterator[bytes]:
    """Yield the hash of each text from hashlib."""
    for text in texts.to_pylist():
        yield hashlib.sha256(text.encode()).digest()[:HASH_BYTES]


def lines(document: Document) -> Iterator[str]:
    """Yield the table."""
    yield f"{'per text':40}{'lock, µs':>12}{'processor, µs':>16}"
    for name, measured in document["lock"].items():
        yield f"{name:40}{measured['lock_us']:>12.3f}{measured['processor_us']:>16.3f}"
    fed = document["sorted"]
    yield f"null encoder: {fed['rows']:,} texts in {fed['seconds']:.2f} s"


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims."""
    measured = document["lock"]
    lock = sum(work["lock_us"] for name, work in measured.items() if name != _COMPARED)
    yield at_most("µs of lock per text: hashing, ids and reading", 1.0, lock)
    fed = document["sorted"]["rows"] / document["sorted"]["seconds"]
    yield Target("texts/s into a null encoder", 1_200_000, fed)


def main() -> None:
    options = Options(__doc__)
    options.add_size("--rows", 4_000_000, 20_000, "texts of the run with a null encoder")
    options.add_size("--texts", 200_000, 20_000, "whose lock is measured")
    options.add_size("--rounds", 5, 1)
    arguments = options.parse_args()
    document = start_document("lock", arguments, ("pyarrow", "numpy", "polars", "polars-hash"))
    with temporary_folder() as folder:
        os.environ["SURGE_CACHE_DIR"] = str(folder / "cache")
        say("lock")
        document["lock"] = in_own_process(
            measure_lock, arguments.texts, arguments.rounds, folder / "catalog"
        )
        say("null encoder")
        document["sorted"] = measure_sorted(arguments, folder)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
