"""Derived spaces: rows per second of each conversion, from memory and from files to files.

*memory* converts float32 vectors of 384 dimensions that lie in memory, in batches of 1,024 rows, on
one thread. *files* derives a whole space from Parquet files with ids and texts of about 100 bytes,
on one thread, checksums, compression and flushes included. Both give rows per second of processor
time, and for files of elapsed time too. *reading* is what reading the files alone takes, and is a
part of *files*.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pyarrow as pa

from benchmarks.harness import Document, Target, command_line, print_document, say, start_document
from benchmarks.output import write_output
from benchmarks.synthetic import draw_texts
from surge_dagster.engine.derived.conversion import convert, cut
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.derived.parent_files import parent_rows
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.formats import file_name, is_output_file, read_published_file
from surge_dagster.engine.model.derivation import DerivedDtype
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store.local_store import LocalStore

DIMENSION = 384
KINDS: tuple[tuple[DerivedDtype, int], ...] = (
    ("float32", 256),
    ("float16", 384),
    ("int8", 384),
    ("int8", 256),
    ("binary", 384),
)
_BATCH_ROWS = 1024
_MEAN_TEXT_BYTES = 100
_LEAST = 500_000


def _measure(
    store: LocalStore,
    parent: Space,
    matrix: np.ndarray,
    kind: tuple[DerivedDtype, int],
    rounds: int,
) -> Document:
    dtype, dimension = kind
    say(f"  {dtype}, {dimension} dimensions")
    first = DeriveRun(store, parent, dtype, dimension, threads=1)
    list(first.events())

    def in_memory() -> None:
        for start in range(0, len(matrix), _BATCH_ROWS):
            convert(cut(matrix[start : start + _BATCH_ROWS], first.space), first.space)

    def from_files() -> None:
        for stored in list(store.list(first.space.name)):
            if stored.name.endswith(".parquet"):
                store.delete(stored.name)
        run = DeriveRun(store, parent, dtype, dimension, threads=1)
        list(run.events())

    memory = [_rates(in_memory, len(matrix)) for _ in range(rounds)]
    files = [_rates(from_files, len(matrix)) for _ in range(rounds)]
    return {
        "dtype": dtype,
        "dimension": dimension,
        "memory_rows_per_second": statistics.median(cpu for cpu, _ in memory),
        "files_rows_per_cpu_second": statistics.median(cpu for cpu, _ in files),
        "files_rows_per_second": statistics.median(wall for _, wall in files),
    }


def _reading(store: LocalStore, parent: Space, rounds: int) -> float:
    """Rows per second of processor time at which the files of the parent are read, checksums
    included."""
    names = [stored.name for stored in store.list(parent.name) if is_output_file(stored.name)]
    files = [read_published_file(store, name) for name in names]

    def read() -> None:
        for file in files:
            for _ in parent_rows(store, parent, file):
                pass

    rows = sum(file.facts.rows for file in files)
    return statistics.median(_rates(read, rows)[0] for _ in range(rounds))


def _rates(work: Callable[[], None], rows: int) -> tuple[float, float]:
    """Rows per second of processor time and of elapsed time."""
    cpu, wall = process_time(), perf_counter()
    work()
    return rows / (process_time() - cpu), rows / (perf_counter() - wall)


def _write(store: LocalStore, parent: Space, matrix: np.ndarray, partitions: int) -> None:
    claim_space(store, parent)
    for number, part in enumerate(np.array_split(matrix, partitions)):
        key, rows = f"p{number}", np.arange(len(part), dtype=np.uint64)
        version = desired_version(key, parent.name)
        facts = FileFacts(
            key, parent.name, "m", "fp32", "v1", key, version, len(part), DIMENSION, 0
        )
        texts = draw_texts(0, number, rows, _MEAN_TEXT_BYTES).cast(pa.large_string())
        write_output(
            store.root / file_name(parent.name, key),
            facts,
            pa.array(rows).cast(pa.string()),
            texts,
            part,
        )  # pyright: ignore[reportArgumentType]


def _lines(document: Document) -> Iterator[str]:
    yield f"reading the parent's files: {document['reading_rows_per_cpu_second']:,.0f} rows/s per core"
    yield f"{'rows per second':24}{'memory':>14}{'files, core':>14}{'files':>14}"
    for kind in document["kinds"]:
        rates = ("memory_rows_per_second", "files_rows_per_cpu_second", "files_rows_per_second")
        name = f"{kind['dtype']}, {kind['dimension']}"
        yield f"{name:24}" + "".join(f"{kind[rate]:>14,.0f}" for rate in rates)


def _targets(document: Document) -> Iterator[Target]:
    for kind in document["kinds"]:
        name = f"{kind['dtype']} with {kind['dimension']} dimensions, rows/s per core"
        yield Target(f"{name} from memory", _LEAST, kind["memory_rows_per_second"])
        yield Target(f"{name} from files", _LEAST, kind["files_rows_per_cpu_second"])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="rows of the space")
    parser.add_argument("--partitions", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where files are written; default: a temporary one",
    )
    arguments = parser.parse_args()
    document = start_document("derive", arguments, ("numpy", "pyarrow"))
    parent = EncodingSpec(f"hash://{DIMENSION}").resolve()
    draw = np.random.default_rng(0)
    matrix = draw.standard_normal((arguments.rows, DIMENSION), np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        store = LocalStore(Path(folder) / "out")
        _write(store, parent, matrix, arguments.partitions)
        document["reading_rows_per_cpu_second"] = _reading(store, parent, arguments.rounds)
        document["kinds"] = [
            _measure(store, parent, matrix, kind, arguments.rounds) for kind in KINDS
        ]
    print_document(document, _lines(document), _targets(document))


if __name__ == "__main__":
    main()
