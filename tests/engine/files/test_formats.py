"""Output files: what they state about themselves, and the memory of writing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files.facts import FileFacts, InvalidFile
from surge_dagster.engine.files.formats import (
    END_BYTES,
    PublishedFile,
    read_published_file,
)
from surge_dagster.engine.files.parquet import (
    PAGE_BYTES,
    STRING_COPIES,
    WRITE_BATCH_ROWS,
    piece_bytes,
    read_facts,
    write_file,
)
from surge_dagster.engine.files.rows import schema, table_of
from surge_dagster.engine.store.local_store import LocalStore

FACTS = FileFacts("Köln", "hash-16-abc", "hash://16", "fp32", "v1", "0" * 32, "1" * 32, 3, 16, 2)
# What an entry of the footer looks like; a partition may be called that.
IMITATION = "\x18\x0bsurge.space\x18\x05other\x00"
COLUMNS = schema(pa.string(), 16, "float32", include_text=True)


def of_version(size: int) -> FileFacts:
    return replace(FACTS, source_version="v" * size)


def of_key(key: str) -> FileFacts:
    return replace(FACTS, partition_key=key)


def file_of(facts: FileFacts, groups: int = 1) -> bytes:
    sink = pa.BufferOutputStream()
    rows = facts.rows // groups
    texts = pa.array(["text"] * rows, pa.large_string())
    ids = [pa.array(["id"] * rows, pa.string())]
    table = table_of(COLUMNS, ids, texts, np.zeros((rows, 16), np.float32))
    write_file(sink, COLUMNS, facts, [table] * groups)
    return sink.getvalue().to_pybytes()


def facts_in(content: bytes) -> FileFacts:
    return read_facts(pq.read_metadata(pa.BufferReader(content)))


def footer_bytes(content: bytes) -> int:
    return int.from_bytes(content[-8:-4], "little")


def published(folder: Path, content: bytes) -> PublishedFile:
    (folder / "f").write_bytes(content)
    return read_published_file(LocalStore(folder), "f")


def facts_by_file(folder: Path, content: bytes) -> FileFacts:
    return published(folder, content).facts


@settings(max_examples=25, deadline=None)
@given(key=st.text(min_size=1, max_size=400), version=st.text(max_size=200), rows=st.integers(0, 3))
def test_end_of_a_file_gives_the_facts_and_columns_of_its_whole_footer(
    tmp_path_factory: pytest.TempPathFactory, key: str, version: str, rows: int
) -> None:
    content = file_of(replace(FACTS, partition_key=key, source_version=version, rows=rows))
    found = published(tmp_path_factory.getbasetemp(), content)
    assert (found.facts, found.columns) == (facts_in(content), COLUMNS)
    assert not found.columns.metadata


@pytest.mark.parametrize(
    "facts",
    [
        of_key("a\0b"),
        *map(of_version, (0, 1, 127, 128, 129, 5_000, 3 * END_BYTES)),
        *map(of_key, (IMITATION, f"a{IMITATION}b", "PAR1", "surge.space")),
    ],
)
def test_long_and_misleading_facts_are_read_from_the_end_of_the_file(
    tmp_path: Path, facts: FileFacts
) -> None:
    assert facts_by_file(tmp_path, file_of(facts)) == facts


def test_flipped_bit_never_gives_other_facts(tmp_path: Path) -> None:
    content = file_of(FACTS)
    first = len(content) - 8 - footer_bytes(content)
    harmless, random = 0, Random(0)
    edges = [*range(first, first + 4), *range(len(content) - 9, len(content))]
    for place in [*edges, *random.sample(range(first, len(content)), 400)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.randrange(8)
        try:
            assert facts_by_file(tmp_path, bytes(damaged)) == FACTS, place
            harmless += 1
        except InvalidFile:
            continue
        assert first < place < len(content) - 8, (
            "the footer's beginning and what follows it are always refused"
        )
    assert harmless, "columns and row groups are not what this decides"


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    content = file_of(FACTS)
    for size in range(0, len(content), 23):
        with pytest.raises(InvalidFile):
            facts_by_file(tmp_path, content[:size])


@pytest.mark.parametrize("length", [0, 5_000_000, 0xFFFFFFFF])
def test_footer_that_does_not_fit_into_its_file_is_refused(tmp_path: Path, length: int) -> None:
    content = file_of(FACTS)
    with pytest.raises(InvalidFile, match="it is damaged"):
        facts_by_file(tmp_path, content[:-8] + length.to_bytes(4, "little") + content[-4:])


def test_file_of_another_program_is_refused_with_the_reason(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "f")
    with pytest.raises(InvalidFile, match="name the format None"):
        read_published_file(LocalStore(tmp_path), "f")
    with pytest.raises(FileNotFoundError):
        read_published_file(LocalStore(tmp_path), "g")


def test_rows_refer_to_the_matrix_without_a_copy() -> None:
    matrix, ids = np.zeros((1000, 16), np.float32), pa.array([str(row) for row in range(300)])
    columns = schema(ids.type, 16, "float32", include_text=False)
    table = table_of(columns, [ids], ids.cast(pa.large_string()), matrix[100:400])
    [chunk] = table["embedding"].chunks
    values = chunk.flatten()
    assert values.buffers()[1].address + values.offset * 4 == matrix[100:].ctypes.data


WRITE_EACH_SIZE = """
import json, os, sys, tempfile
import numpy as np, pyarrow as pa
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.parquet import write_file
from surge_dagster.engine.files.rows import schema, table_of

def peak(rows, dimension, text_bytes, dtype):
    # zstd cannot make it much smaller
    noise = np.random.default_rng(1).bytes(text_bytes).hex()[:text_bytes]
    texts = pa.array([noise] * rows, pa.large_string())
    ids = pa.array([str(row) for row in range(rows)])
    matrix = np.random.default_rng(2).standard_normal((rows, dimension)).astype(dtype)
    pools.append(pa.proxy_memory_pool(pa.system_memory_pool()))
    pa.set_memory_pool(pools[-1])
    facts = FileFacts("k", "s-1", "m", "fp32", "v1", "0" * 32, "1" * 32, rows, dimension, 0)
    columns = schema(ids.type, dimension, dtype, include_text=True)
    sink = pa.OSFile(tempfile.mktemp(dir=sys.argv[1]), "wb")
    write_file(sink, columns, facts, [table_of(columns, [ids], texts, matrix)])
    return pools[-1].max_memory()
pools = []  # each outlives its buffers
print(json.dumps([peak(*size) for size in json.loads(sys.argv[2])]), flush=True)
os._exit(0)
"""
_SIZES = (
    (30_000, 384, 46, "float32"),
    (30_000, 384, 300, "float16"),
    (1_000, 16, 30_000, "float32"),
    (1, 384, 46, "float32"),
    (10, 384, 46, "float32"),
    (35, 384, 46, "float32"),
    (20, 16, 3_000, "float32"),
    (10_000, 14, 200, "float32"),
)


def test_estimate_covers_the_memory_that_writing_takes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_EACH_SIZE, str(tmp_path), json.dumps(_SIZES)]
    peaks = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    )
    for (rows, dimension, text_bytes, dtype), peak in zip(_SIZES, peaks, strict=True):
        itemsize = np.dtype(dtype).itemsize
        strings = STRING_COPIES * min(rows * text_bytes, PAGE_BYTES + WRITE_BATCH_ROWS * text_bytes)
        # Columns are written one after the other.
        covered = max(
            piece_bytes(rows, dimension, itemsize), piece_bytes(0, dimension, itemsize) + strings
        )
        assert peak <= covered, (rows, dimension, text_bytes, dtype)
