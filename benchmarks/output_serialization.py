"""From a matrix to Parquet: by reference beside the naive way, a copy of the memory and a bare write.

The naive way is `matrix.tolist()` into an Arrow list column; the same writer then writes the same bytes. Each side has
a process of its own, so that its memory can be measured: the most that it held while it worked, beyond what it held
before, over the bytes of the matrix.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.rounds import say
from surge_dagster.catalogs.synthetic import draw_texts
from surge_dagster.engine.files.embedding_file import EmbeddingFileWriter, FileFacts, schema
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.support.process_memory import give_back_unused

DIMENSION = 384
SIDES = ("zero copy", "naive")
_ONCE_FROM_ROWS = 200_000  # the naive side of so many takes minutes


def serialization_document(sizes: list[int], rounds: int, memory: Path, disk: Path) -> list[dict[str, Any]]:
    """A document for each size; ratios are within a round, and the sides take turns in changing order."""
    return [_size_document(rows, rounds, memory, disk) for rows in sizes]


def _size_document(rows: int, rounds: int, memory: Path, disk: Path) -> dict[str, Any]:
    say(f"  {rows:,} rows")
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    sides = {side: _Side(side, rows, memory, disk) for side in SIDES}
    try:
        for index in range(rounds):
            for side in SIDES if index % 2 == 0 else reversed(SIDES):
                if side == SIDES[0] or index == 0 or rows < _ONCE_FROM_ROWS:
                    turns[side].append(sides[side].turn())
    finally:
        for side in sides.values():
            side.close()
    ours, naive = turns["zero copy"], turns["naive"]
    size = rows * DIMENSION * 4
    return {
        "rows": rows,
        "matrix_bytes": size,
        "rounds": rounds,
        "naive_rounds": len(naive),
        "ratio_to_naive": statistics.median(
            theirs["seconds"] / turn["seconds"] for theirs, turn in zip(naive, ours, strict=False)
        ),
        "naive_seconds": statistics.median(turn["seconds"] for turn in naive),
        "naive_extra_memory": max(turn["extra_bytes"] for turn in naive) / size,
        "extra_memory": max(turn["extra_bytes"] for turn in ours) / size,
        **{f"{name}": statistics.median(turn[name] for turn in ours) for name in ours[0] if name.endswith("seconds")},
        "validation_share": statistics.median(turn["validation_seconds"] / turn["seconds"] for turn in ours),
        "time_over_memcpy": statistics.median(turn["seconds"] / turn["memcpy_seconds"] for turn in ours),
        "disk_time_over_raw_write": statistics.median(
            turn["disk_seconds"] / turn["raw_write_seconds"] for turn in ours
        ),
    }


class _Side:
    """A process that holds a matrix and writes it whenever it is told to."""

    def __init__(self, side: str, rows: int, memory: Path, disk: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.output_serialization", side, str(rows), str(memory), str(disk)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # it has drawn its rows

    def turn(self) -> dict[str, float]:
        """One turn's seconds and bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side of the serialization ended early: exit code {self._process.wait()}")
        return json.loads(line)


def main() -> None:
    """A side's process: one line of figures for every line of input."""
    side, rows, memory, disk = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((rows, DIMENSION), np.float32)
    matrix /= np.sqrt(np.vecdot(matrix, matrix))[:, None]
    ids = pa.array(np.arange(rows)).cast(pa.string())
    texts = draw_texts(0, 1, np.arange(rows, dtype=np.uint64)).cast(pa.large_string())
    in_memory, on_disk = memory / f"{side}.parquet", disk / f"{side}.parquet"
    _write(side, in_memory, ids[:10], texts[:10], matrix[:10])  # so that code and codecs are loaded
    print("{}", flush=True)
    for _ in sys.stdin:
        before = _begin_watching()
        seconds = _seconds(lambda: _write(side, in_memory, ids, texts, matrix))
        extra = _status("VmHWM") - before
        in_memory.unlink()
        found = {"seconds": seconds, "extra_bytes": float(extra)}
        if side == SIDES[0]:
            found["validation_seconds"] = _seconds(lambda: invalid_row(matrix, normalized=True))
            found["disk_seconds"] = _seconds(lambda: _write(side, on_disk, ids, texts, matrix, flush=True))
            on_disk.unlink()
            found["raw_write_seconds"] = _seconds(lambda: _write_raw(on_disk, matrix))
            on_disk.unlink()
            found["memcpy_seconds"] = _memcpy_seconds(matrix)
        print(json.dumps(found), flush=True)


def _write(side: str, path: Path, ids: pa.Array, texts: pa.Array, matrix: np.ndarray, *, flush: bool = False) -> None:
    facts = FileFacts("all", "space", "model", "fp32", "v1", "0" * 32, "0" * 32, len(matrix), DIMENSION, 0)
    with pa.OSFile(str(path), "wb") as sink:
        if side == SIDES[0]:
            with EmbeddingFileWriter(sink, pa.string(), DIMENSION, "float32", include_text=True) as writer:
                writer.append(ids, texts, matrix)
                writer.close(facts)
        else:
            _write_naively(sink, ids, texts, matrix, facts)
    if flush:
        _flush(path)


def _write_naively(sink: pa.NativeFile, ids: pa.Array, texts: pa.Array, matrix: np.ndarray, facts: FileFacts) -> None:
    columns = schema(pa.string(), DIMENSION, "float32", include_text=True)
    vectors = pa.array(matrix.tolist(), columns.field("embedding").type)
    with EmbeddingFileWriter(sink, pa.string(), DIMENSION, "float32", include_text=True) as writer:
        writer.append_table(pa.Table.from_arrays([ids, texts, vectors], schema=columns))
        writer.close(facts)


def _write_raw(path: Path, matrix: np.ndarray) -> None:
    matrix.tofile(path)
    _flush(path)


def _memcpy_seconds(matrix: np.ndarray) -> float:
    copy = np.ones_like(matrix)  # its pages are there before the copy
    return _seconds(lambda: np.copyto(copy, matrix))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _seconds(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _begin_watching() -> int:
    """Forget the most memory that this process ever held; what it holds now, in bytes."""
    give_back_unused()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
