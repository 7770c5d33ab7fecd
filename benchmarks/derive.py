"""Derived spaces: rows per second of each conversion, from memory and from files to files.

    python -m benchmarks.derive [--rows 50000] [--rounds 3] [--quick]

*memory* converts float32 vectors of 384 dimensions that lie in memory, in batches of 1,024 rows, on
one thread. *files* derives a whole space from Parquet files with ids and texts of about 100 bytes,
on one thread, checksums, compression and flushes included. *reading*, a part of *files*, only reads
the files. All are rows per second of processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import process_time

import numpy as np
import pyarrow as pa

from benchmarks.harness import (
    Document,
    Options,
    Target,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.output import drawn_rows, write_output
from benchmarks.paced_runs import DIMENSION, drawn_texts
from surge_dagster import EncodingSpec
from surge_dagster.engine.derived.conversion import convert, cut
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.derived.parent_files import parent_rows
from surge_dagster.engine.files.formats import (
    SUFFIX,
    file_name,
    read_published_file,
)
from surge_dagster.engine.model.spec import DerivedDtype, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store.local_store import LocalStore

_KINDS: tuple[tuple[DerivedDtype, int], ...] = (
    ("float32", 256),
    ("float16", 384),
    ("int8", 384),
    ("int8", 256),
    ("binary", 384),
)
_BATCH_ROWS = 1024
_MEAN_TEXT_BYTES = 100
_TARGET_ROWS_PER_SECOND = 500_000


def write_parent(store: LocalStore, parent: Space, matrix: np.ndarray, partitions: int) -> None:
    """Write the files of the parent space."""
    claim_space(store, parent)
    for number, part in enumerate(np.array_split(matrix, partitions)):
        key = f"p{number}"
        ids = pa.array(map(str, range(len(part))), pa.string())
        texts = drawn_texts(len(part), _MEAN_TEXT_BYTES, number=number)
        path = store.root / file_name(parent.name, key)
        write_output(path, ids, texts, part, key=key, space=parent.name, digest=key)


class Parent:
    """A space whose files are derived from.

    Args:
        rounds: times that each conversion is measured.
    """

    def __init__(self, store: LocalStore, space: Space, matrix: np.ndarray, rounds: int) -> None:
        self._store = store
        self._space = space
        self._matrix = matrix
        self._rounds = rounds

    def reading_rate(self) -> float:
        """Return the rate at which the files are read, checksums included."""
        files = []
        for stored in self._store.list(self._space.name):
            if stored.name.endswith(SUFFIX):
                files.append(read_published_file(self._store, stored.name))

        def read() -> None:
            for file in files:
                for _ in parent_rows(self._store, self._space, file):
                    pass

        return self._rate(read)

    def measure(self, dtype: DerivedDtype, dimension: int) -> Document:
        """Return the rates of a conversion."""
        say(f"  {dtype}, {dimension} dimensions")
        derived = self._derive(dtype, dimension)

        def from_memory() -> None:
            for start in range(0, len(self._matrix), _BATCH_ROWS):
                convert(cut(self._matrix[start : start + _BATCH_ROWS], derived), derived)

        def from_files() -> None:
            for path in (self._store.root / derived.name).glob("*.parquet"):
                path.unlink()
            self._derive(dtype, dimension)

        return {
            "dtype": dtype,
            "dimension": dimension,
            "memory_rows_per_second": self._rate(from_memory),
            "files_rows_per_second": self._rate(from_files),
        }

    def _derive(self, dtype: DerivedDtype, dimension: int) -> Space:
        run = DeriveRun(self._store, self._space, dtype, dimension, threads=1)
        list(run.events())
        return run.space

    def _rate(self, work: Callable[[], None]) -> float:
        rates = []
        for _ in range(self._rounds):
            begun = process_time()
            work()
            rates.append(len(self._matrix) / (process_time() - begun))
        return median(rates)


def lines(document: Document) -> Iterator[str]:
    """Yield the table."""
    yield f"reading the parent's files: {document['reading_rows_per_second']:,.0f} rows/s per core"
    yield f"{'rows/s per core':24}{'memory':>14}{'files':>14}"
    for kind in document["kinds"]:
        name = f"{kind['dtype']}, {kind['dimension']}"
        memory = kind["memory_rows_per_second"]
        yield f"{name:24}{memory:>14,.0f}{kind['files_rows_per_second']:>14,.0f}"


def targets(document: Document) -> Iterator[Target]:
    """Yield two aims for each conversion."""
    for kind in document["kinds"]:
        for origin in ("memory", "files"):
            name = f"{kind['dtype']}, {kind['dimension']}, rows/s per core from {origin}"
            measured = kind[f"{origin}_rows_per_second"]
            yield Target(name, _TARGET_ROWS_PER_SECOND, measured)


def main() -> None:
    options = Options(__doc__)
    options.add_size("--rows", 50_000, 200, "of the space")
    options.add_size("--partitions", 10, 2)
    options.add_size("--rounds", 3, 1)
    arguments = options.parse_args()
    document = start_document("derive", arguments, ("numpy", "pyarrow"))
    space = EncodingSpec(f"hash://{DIMENSION}").resolve()
    _, _, matrix = drawn_rows(arguments.rows)
    with temporary_folder() as folder:
        store = LocalStore(folder / "out")
        write_parent(store, space, matrix, arguments.partitions)
        parent = Parent(store, space, matrix, arguments.rounds)
        document["reading_rows_per_second"] = parent.reading_rate()
        document["kinds"] = [parent.measure(*kind) for kind in _KINDS]
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
