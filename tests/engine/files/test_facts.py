"""Facts read back as they were written, and no change of them passes unnoticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files import facts as facts_module
from surge_dagster.engine.files.facts import (
    ENTRY_NAMES,
    FileFacts,
    InvalidFile,
    desired_version,
    facts_of,
    guarded_metadata,
)

FACTS = FileFacts("shoes", "space", "model", "fp32", "v1", "0" * 32, "1" * 32, 10, 384, 2)

words = st.text(max_size=20)


@settings(derandomize=True, deadline=None)
@given(key=words, version=words, rows=st.integers(0, 10**9), truncated=st.integers(0, 100))
def test_facts_are_read_back_as_they_were_written(
    key: str, version: str, rows: int, truncated: int
) -> None:
    facts = replace(
        FACTS, partition_key=key, source_version=version, rows=rows, truncated=truncated
    )
    assert facts_of(guarded_metadata(facts)) == facts


def test_metadata_name_every_fact_of_the_format() -> None:
    promised = (
        "format rows_reused rows_encoded oldest_encoded_at partition_key "
        "space model precision source_version content_digest desired_version rows dimension "
        "truncated writer "
        "source_rows skipped_rows blank_texts rejected_rows transient_rows rows_version "
        "carried_columns metadata_digest"
    )
    assert tuple(f"surge.{name}".encode() for name in promised.split()) == ENTRY_NAMES
    assert tuple(guarded_metadata(FACTS)) == ENTRY_NAMES


def test_key_that_is_not_text_can_be_written_and_read() -> None:
    facts = replace(FACTS, partition_key="\ud800")
    assert facts_of(guarded_metadata(facts)).partition_key == "\ufffd" * 3


@pytest.mark.parametrize("name", ENTRY_NAMES)
def test_changed_or_missing_entry_is_refused(name: bytes) -> None:
    written = guarded_metadata(FACTS)
    changed = written | {name: written[name] + b"0"}
    missing = dict(written)
    del missing[name]
    for entries in (changed, missing):
        expected = "name the format" if name == b"surge.format" else "do not match their own digest"
        with pytest.raises(InvalidFile, match=expected):
            facts_of(entries)


def test_metadata_of_another_program_is_refused() -> None:
    for metadata in (None, {}, {b"pandas": b"{}"}):
        with pytest.raises(InvalidFile, match="name the format None; expected '3'"):
            facts_of(metadata)
    broken = replace(FACTS, rows="ten")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidFile, match="cannot be read"):
        facts_of(guarded_metadata(broken))


def test_file_of_an_older_format_is_not_read() -> None:
    older = guarded_metadata(FACTS) | {b"surge.format": b"2"}

    with pytest.raises(InvalidFile, match="name the format '2'; expected '3'"):
        facts_of(older)


def test_metadata_that_lack_an_entry_under_a_right_digest_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(facts_module, "_READERS", {b"surge.rows": ("rows", int)})
        other = guarded_metadata(FACTS)

    with pytest.raises(InvalidFile, match="its metadata cannot be read"):
        facts_of(other)


def test_desired_version_depends_on_content_and_space() -> None:
    made = {desired_version("a", "s"), desired_version("b", "s"), desired_version("a", "t")}
    assert len(made) == 3
    assert all(len(version) == 32 for version in made)
