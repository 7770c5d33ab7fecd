"""Facts found in a file's last bytes are those that taking the footer apart gives, or none."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files.embedding_file import EmbeddingFileWriter, FileFacts, InvalidFile, read_facts
from surge_dagster.engine.files.footer_end import END_BYTES, facts_in_footer, footer_bytes
from surge_dagster.engine.output.freshness import read_published_file
from surge_dagster.engine.store.local_store import LocalStore

FACTS = FileFacts("Köln", "hash-16-abc", "hash://16", "fp32", "v1", "0" * 32, "1" * 32, 3, 16, 2)
# What an entry of the footer looks like; a partition may be called that.
IMITATION = "\x18\x0bsurge.space\x18\x05other\x00"


def file_of(facts: FileFacts, groups: int = 1) -> bytes:
    sink = pa.BufferOutputStream()
    with EmbeddingFileWriter(sink, pa.string(), 16, "float32", include_text=True) as writer:
        for _ in range(groups):
            rows = facts.rows // groups
            texts = pa.array(["text"] * rows, pa.large_string())
            writer.append(pa.array(["id"] * rows), texts, np.zeros((rows, 16), np.float32))
        writer.close(facts)
    return sink.getvalue().to_pybytes()


def facts_in(content: bytes) -> FileFacts:
    return read_facts(pq.read_metadata(pa.BufferReader(content)))


def footer_of(content: bytes) -> bytes:
    return content[-8 - footer_bytes(content, len(content)) : -8]


def facts_by_file(folder: Path, content: bytes) -> FileFacts:
    (folder / "f").write_bytes(content)
    return read_published_file(LocalStore(folder), "f").facts


@settings(max_examples=25, deadline=None)
@given(
    key=st.text(min_size=1, max_size=400).map(lambda key: key.replace("\0", "0")),
    version=st.text(max_size=200).map(lambda version: version.replace("\0", "0")),
    rows=st.integers(0, 3),
)
def test_they_are_what_the_whole_footer_says(key: str, version: str, rows: int) -> None:
    content = file_of(replace(FACTS, partition_key=key, source_version=version, rows=rows))
    assert facts_in_footer(footer_of(content)) == facts_in(content)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 5_000])
def test_lengths_of_one_byte_and_of_several_are_understood(size: int) -> None:
    found = facts_in_footer(footer_of(file_of(replace(FACTS, source_version="v" * size))))
    assert found is not None and len(found.source_version) == size


@pytest.mark.parametrize(
    "facts",
    [replace(FACTS, partition_key="a\0b"), replace(FACTS, source_version="v" * 3 * END_BYTES)],
    ids=["a zero byte", "longer than what is read"],
)
def test_what_the_end_does_not_tell_the_whole_footer_does(tmp_path: Path, facts: FileFacts) -> None:
    assert facts_by_file(tmp_path, file_of(facts)) == facts


def test_a_footer_of_many_row_groups_gives_them_too(tmp_path: Path) -> None:
    content = file_of(replace(FACTS, rows=60), groups=60)
    assert footer_bytes(content, len(content)) > END_BYTES
    assert facts_by_file(tmp_path, content) == facts_in(content)


def test_no_flipped_bit_gives_other_facts(tmp_path: Path) -> None:
    content = file_of(FACTS)
    first = len(content) - 8 - footer_bytes(content, len(content))
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
        assert first < place < len(content) - 8, "the footer's beginning and what follows it are never let pass"
    assert harmless, "columns and row groups are not what this decides"


def test_no_damage_of_several_bytes_gives_other_facts(tmp_path: Path) -> None:
    content, random = file_of(FACTS), Random(0)
    first = len(content) - 8 - footer_bytes(content, len(content))
    for _ in range(200):
        damaged = bytearray(content)
        start = random.randrange(first, len(content))
        stop = min(len(content), start + random.randint(1, 60))
        damaged[start:stop] = random.choice([bytes(stop - start), random.randbytes(stop - start)])
        with contextlib.suppress(InvalidFile):
            assert facts_by_file(tmp_path, bytes(damaged)) == FACTS


def test_no_cut_is_taken_for_a_file(tmp_path: Path) -> None:
    content = file_of(FACTS)
    for size in range(0, len(content), 23):
        with pytest.raises(InvalidFile):
            facts_by_file(tmp_path, content[:size])


@pytest.mark.parametrize("length", [0, 5_000_000, 0xFFFFFFFF])
def test_a_footer_that_does_not_fit_into_its_file_is_refused(tmp_path: Path, length: int) -> None:
    content = file_of(FACTS)
    with pytest.raises(InvalidFile, match="which cannot be"):
        facts_by_file(tmp_path, content[:-8] + length.to_bytes(4, "little") + content[-4:])


@pytest.mark.parametrize("key", [IMITATION, f"a{IMITATION}b", "PAR1", "surge.space", "\x18\x0csurge.format\x18\x011"])
def test_a_key_that_looks_like_an_entry_misleads_nobody(tmp_path: Path, key: str) -> None:
    facts = replace(FACTS, partition_key=key)
    assert facts_in_footer(footer_of(file_of(facts))) in (None, facts)
    assert facts_by_file(tmp_path, file_of(facts)) == facts


def test_a_file_of_somebody_else_is_refused_with_the_reason(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "f")
    with pytest.raises(InvalidFile, match="name the format None"):
        read_published_file(LocalStore(tmp_path), "f")
    with pytest.raises(FileNotFoundError):
        read_published_file(LocalStore(tmp_path), "g")
