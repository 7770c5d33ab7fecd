"""What sources cost: grouping a table whose rows stand in no order, and feeding runs from a sorted one and folders.

    python -m benchmarks.sources --rows 10000000      # the size of the aims; the default is a fifth of it

Each part runs in a process of its own, so that its peak of memory is its own. Each figure stands beside its aim, and
the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Document, Target, at_most, print_document, say, start_document
from benchmarks.paced_runs import paced_pool
from benchmarks.source_folders import feed_from_folders, folders_lines, folders_targets, write_folders
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source

AIM_ROWS_PER_SECOND = 1_200_000
AIM_PEAK_BYTES = 600_000_000
AIM_TEXTS_PER_SECOND = 1_000_000
_DIMENSION = 8
_ROWS = 2_000_000
_KEYS = 4_000
_PARTITIONS = 250
_FOLDERS = "folders"
_WRITTEN_ROWS = 250_000
_TEXT_BYTES = {"shuffled": 80, "sorted": 40}  # with an id of 12 bytes and a key, about 100 and 60 a row
_SORTED_ROWS_PER_KEY = 50_000


def write_table(path: Path, rows: int, keys: int, text_bytes: int, *, is_sorted: bool) -> None:
    """Write a Parquet table of ids, random words and keys."""
    random = np.random.default_rng(0)
    offsets = np.arange(_WRITTEN_ROWS + 1, dtype=np.int32) * text_bytes
    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("category", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, rows, _WRITTEN_ROWS):
            count = min(_WRITTEN_ROWS, rows - start)
            letters = random.integers(91, 123, count * text_bytes, dtype=np.uint8)
            letters[letters < 97] = ord(" ")
            buffers = [None, pa.py_buffer(offsets[: count + 1]), pa.py_buffer(letters)]
            numbers = np.arange(start, start + count)
            places = numbers * keys // rows if is_sorted else random.integers(0, keys, count)
            columns = [
                pa.array([f"id-{number:09d}" for number in numbers.tolist()]),
                pa.Array.from_buffers(pa.string(), count, buffers),
                pa.array([f"category {place:05d}" for place in places.tolist()]),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def group(source: Source, folder: Path) -> Document:
    """List a table for the first time, then read every partition."""
    begun = time.perf_counter()
    rows = sum(partition.rows or 0 for partition in source)
    grouped = time.perf_counter()
    peak = _peak_bytes()
    read = sum(len(batch) for partition in source for batch in partition.read())
    if read != rows:
        raise SystemExit(f"{rows:,} rows were grouped and {read:,} came back")
    return {
        "rows": rows,
        "group_seconds": grouped - begun,
        "read_seconds": time.perf_counter() - grouped,
        "peak_bytes": peak,
    }


def feed(source: Source, folder: Path) -> Document:
    """Run over a sorted table with an encoder that computes nothing; the vectors are written."""
    begun = time.perf_counter()
    rows = sum(partition.rows or 0 for partition in source)
    listed = time.perf_counter()
    if sum(len(batch) for partition in source for batch in partition.read()) != rows:
        raise SystemExit("rows are missing")
    read = time.perf_counter()
    with paced_pool(dimension=_DIMENSION) as pool:
        run = EmbeddingRun(source, open_store(folder / "out"), pool, include_text=False)
        for _ in run:
            pass
        seconds = run.report.wall_seconds
    return {"rows": rows, "list_seconds": listed - begun, "read_seconds": read - listed, "run_seconds": seconds}


PARTS: dict[str, Callable[[Source, Path], Document]] = {"shuffled": group, "sorted": feed}


def measure(arguments: argparse.Namespace) -> Document:
    """Measure every part; writing the sources is not part of any figure."""
    document = start_document("sources", arguments, ("pyarrow", "numpy"))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in PARTS:
            say(f"writing a {name} table of {arguments.rows:,} rows")
            keys = arguments.keys if name == "shuffled" else max(1, arguments.rows // _SORTED_ROWS_PER_KEY)
            path = Path(folder) / f"{name}.parquet"
            write_table(path, arguments.rows, keys, _TEXT_BYTES[name], is_sorted=name == "sorted")
            say(f"reading it, {path.stat().st_size / 1e6:,.0f} MB in {keys:,} keys")
            document[name] = _in_own_process(name, folder)
            path.unlink()
        write_folders(Path(folder) / "catalog", arguments.partitions)
        say(f"reading {arguments.partitions:,} folders from a disk and from a bucket")
        document[_FOLDERS] = _in_own_process(_FOLDERS, folder)
    return document


def _in_own_process(part: str, folder: str) -> Document:
    command = [sys.executable, "-m", "benchmarks.sources", "--part", part, "--folder", folder]
    environment = {**os.environ, "SURGE_CACHE_DIR": f"{folder}/cache"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def lines(document: Document) -> Iterator[str]:
    """The table."""
    shuffled, ordered = document["shuffled"], document["sorted"]
    yield f"{'':44}{'rows':>12}{'seconds':>9}{'rows/s':>12}"
    for name, part, step in (
        ("shuffled table: grouping", shuffled, "group_seconds"),
        ("shuffled table: reading all partitions", shuffled, "read_seconds"),
        ("sorted table: first listing", ordered, "list_seconds"),
        ("sorted table: reading all partitions", ordered, "read_seconds"),
        ("sorted table: run with a null encoder", ordered, "run_seconds"),
    ):
        yield f"{name:44}{part['rows']:>12,}{part[step]:>9.2f}{part['rows'] / part[step]:>12,.0f}"
    yield f"peak memory of the process that groups: {shuffled['peak_bytes'] / 1e6:,.0f} MB"
    yield from folders_lines(document[_FOLDERS])


def targets(document: Document) -> list[Target]:
    """What was to be reached, on two cores."""
    shuffled, ordered = document["shuffled"], document["sorted"]
    return [
        Target("rows/s grouped", AIM_ROWS_PER_SECOND, shuffled["rows"] / shuffled["group_seconds"]),
        at_most("bytes of memory while grouping", AIM_PEAK_BYTES, shuffled["peak_bytes"]),
        Target("texts/s into a null encoder", AIM_TEXTS_PER_SECOND, ordered["rows"] / ordered["run_seconds"]),
        *folders_targets(document[_FOLDERS]),
    ]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, default=_ROWS, help=f"of each table ({_ROWS:,}; the aims are for 10,000,000)")
    add("--keys", type=int, default=_KEYS, help=f"of the shuffled table ({_KEYS:,})")
    add("--partitions", type=int, default=_PARTITIONS, help=f"folders of small files ({_PARTITIONS:,})")
    add("--folder", help="where the tables, the grouped rows and the vectors are written (the temporary folder)")
    add("--part", choices=(*PARTS, _FOLDERS), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """Parse, measure, print."""
    arguments = parse()
    if arguments.part:
        folder = Path(arguments.folder)
        if arguments.part == _FOLDERS:
            print(json.dumps(feed_from_folders(folder)))
            return
        source = open_source(folder / f"{arguments.part}.parquet", partition_by=["category"])
        print(json.dumps(PARTS[arguments.part](source, folder)))
        return
    document = measure(arguments)
    print_document(document, lines(document), targets(document))


if __name__ == "__main__":
    main()
