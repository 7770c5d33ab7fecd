from __future__ import annotations

import dagster as dg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.orchestration.partition_keys import (
    MOST_BYTES,
    from_partition_key,
    to_partition_key,
    with_short_keys,
)
from tests.small_catalogs import partition_of

AWKWARD = st.text(
    alphabet=st.sampled_from('ab.%,[]"*| \t\n\u2028\u00a0äß/'), min_size=1, max_size=12
)


@given(AWKWARD | st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_every_key_survives_the_round_trip(key: str) -> None:
    assert from_partition_key(to_partition_key(key)) == key


@given(keys=st.lists(AWKWARD, min_size=20, max_size=20, unique=True))
@settings(max_examples=3)
def test_dagster_accepts_every_key(keys: list[str]) -> None:
    mapped = [to_partition_key(key) for key in keys]
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("catalog", mapped)
        assert set(instance.get_dynamic_partitions("catalog")) == set(mapped)
    for key in mapped:
        assert not set(key) & set(',[]"*|')
        assert key == key.strip()


@pytest.mark.parametrize(
    "key", ["scikit-learn", "jaraco.text", "Köln", "a/b", "..", "A", "日本語", "a b", "x" * 300]
)
def test_ordinary_keys_are_not_encoded(key: str) -> None:
    assert to_partition_key(key) == key


def test_only_unsafe_characters_are_encoded() -> None:
    assert to_partition_key('Köln, "x" [1]') == "Köln%2C %22x%22 %5B1%5D"
    assert to_partition_key("100%") == "100%25"
    assert to_partition_key("a....b") == "a%2E%2E%2E%2Eb"
    assert to_partition_key(" a ") == "%20a%20"


@pytest.mark.parametrize("key", ["", "\ud800"])
def test_key_that_is_not_text_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"empty|Unicode"):
        to_partition_key(key)


@pytest.mark.parametrize("key", ["%FF", "%FF%41", "50%", "a,b"])
def test_partition_key_that_encodes_no_key_stays_as_it_is(key: str) -> None:
    assert from_partition_key(key) == key


@pytest.mark.parametrize(("character", "size"), [("x", 1), ("%", 3), ("ä", 2), ("\u2028", 9)])
def test_too_long_key_is_refused_under_the_name_of_its_folder(character: str, size: int) -> None:
    longest = character * (MOST_BYTES // size)
    too_long = longest + character

    fits, refused = with_short_keys(partition_of(key, [("1", "a")]) for key in (longest, too_long))

    assert fits.key == longest
    assert [batch.ids.to_pylist() for batch in fits.read()] == [["1"]]

    assert refused.key == encode_key(too_long)
    assert refused.current_source_version() == "v1"

    with pytest.raises(DataError, match=r"no room for more than 1,000. Give it a shorter key"):
        list(refused.read())
