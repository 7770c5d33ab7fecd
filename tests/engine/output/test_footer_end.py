"""Facts found in a file's last bytes are those that taking the footer apart gives, or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.output.embedding_file import EmbeddingFileWriter, FileFacts, InvalidFile, read_facts
from surge_dagster.engine.output.footer_end import END_BYTES, facts_at_end
from surge_dagster.engine.output.freshness import read_file_facts
from surge_dagster.engine.output.local_store import LocalStore

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


@settings(max_examples=25, deadline=None)
@given(key=st.text(min_size=1, max_size=400), version=st.text(max_size=200), rows=st.integers(0, 3))
def test_they_are_what_the_whole_footer_says(key: str, version: str, rows: int) -> None:
    content = file_of(replace(FACTS, partition_key=key, source_version=version, rows=rows))
    assert facts_at_end(content[-END_BYTES:]) == facts_in(content)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 5_000])
def test_lengths_of_one_byte_and_of_several_are_understood(size: int) -> None:
    content = file_of(replace(FACTS, source_version="v" * size))
    found = facts_at_end(content[-END_BYTES:])
    assert found is not None and len(found.source_version) == size


def test_a_footer_of_many_row_groups_gives_them_too() -> None:
    content = file_of(replace(FACTS, rows=60), groups=60)
    assert int.from_bytes(content[-8:-4], "little") > END_BYTES
    assert facts_at_end(content[-END_BYTES:]) == facts_in(content)


def test_no_flipped_bit_and_no_cut_gives_other_facts() -> None:
    content = file_of(FACTS)
    length = int.from_bytes(content[-8:-4], "little")
    for place in range(len(content) - 8 - length, len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        assert facts_at_end(bytes(damaged)) in (None, FACTS), place
    for size in range(0, len(content), 7):
        assert facts_at_end(content[:size]) is None


@pytest.mark.parametrize("key", [IMITATION, f"a{IMITATION}b", "PAR1", "surge.space"])
def test_a_key_that_looks_like_an_entry_misleads_nobody(tmp_path: Path, key: str) -> None:
    facts = replace(FACTS, partition_key=key)
    assert facts_at_end(file_of(facts)[-END_BYTES:]) in (None, facts)
    (tmp_path / "f").write_bytes(file_of(facts))
    assert read_file_facts(LocalStore(tmp_path), "f") == facts


def test_what_the_end_does_not_tell_the_whole_footer_does(tmp_path: Path) -> None:
    facts = replace(FACTS, source_version="v" * 3 * END_BYTES)
    (tmp_path / "f").write_bytes(file_of(facts))
    assert facts_at_end((tmp_path / "f").read_bytes()[-END_BYTES:]) is None
    assert read_file_facts(LocalStore(tmp_path), "f") == facts


def test_a_file_of_somebody_else_is_refused_with_the_reason(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "f")
    with pytest.raises(InvalidFile, match="name the format None"):
        read_file_facts(LocalStore(tmp_path), "f")
    with pytest.raises(FileNotFoundError):
        read_file_facts(LocalStore(tmp_path), "g")
