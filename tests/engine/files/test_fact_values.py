"""Facts as bare values are those that a file's metadata hold, and nothing that was changed passes for them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files.embedding_file import FORMAT, FileFacts, entry_names, facts_of
from surge_dagster.engine.files.fact_values import facts_of_values, values_of

FACTS = FileFacts("shoes", "space", "model", "fp32", "v1", "0" * 32, "1" * 32, 10, 384, 2)

words = st.text(st.characters(exclude_characters="\0"), max_size=20)


@settings(derandomize=True, deadline=None)
@given(key=words, version=words, rows=st.integers(0, 10**9), truncated=st.integers(0, 100))
def test_values_are_those_of_the_metadata_and_read_back(key: str, version: str, rows: int, truncated: int) -> None:
    facts = FileFacts(key, "space", "model", "fp32", version, "0" * 32, "1" * 32, rows, 384, truncated)
    values = values_of(facts)
    assert values == list(facts.to_metadata().values())
    assert facts_of_values(values) == facts


def test_values_that_are_not_text_are_read_as_the_whole_footer_is() -> None:
    values = values_of(FileFacts("\ud800", "space", "model", "fp32", "v1", "0", "1", 1, 2, 0))
    found = facts_of_values(values)
    assert found is not None
    assert found == facts_of(dict(zip(entry_names(FileFacts), values, strict=True)), FileFacts, FORMAT)


def test_no_value_can_be_changed_unnoticed() -> None:
    values = values_of(FACTS)
    for place in range(len(values)):
        assert facts_of_values([*values[:place], values[place] + b"0", *values[place + 1 :]]) is None


def test_a_number_that_is_none_makes_no_facts() -> None:
    broken = FileFacts("shoes", "space", "model", "fp32", "v1", "0", "1", "ten", 384, 2)  # pyright: ignore[reportArgumentType]
    assert facts_of_values(values_of(broken)) is None


def test_a_zero_byte_in_a_value_does_not_shift_the_others() -> None:
    assert facts_of_values(values_of(FileFacts("a\0b", "space", "model", "fp32", "v1", "0", "1", 1, 2, 0))) is None
