"""Names of partitions: whatever the key, a name that is safe, its own, and short enough."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.keys import decode_key, encode_key, joined_key

SAFE = re.compile(r"[A-Za-z0-9_%-]{1,180}(~[0-9a-f]{32})?")

keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80) | st.text(
    "aA.~%/ö", min_size=1, max_size=400
)


@given(keys)
def test_name_holds_only_safe_characters_and_at_most_180_bytes(key: str) -> None:
    name = encode_key(key)
    assert SAFE.fullmatch(name)
    assert len(name.encode()) <= 180


@given(keys)
@example("x" * 180)
@example("x" * 181)
def test_short_name_is_decoded_to_its_key_and_long_name_is_not(key: str) -> None:
    name = encode_key(key)
    escaped = quote(key, safe="").replace(".", "%2E").replace("~", "%7E")
    if len(escaped) <= 180:
        assert name == escaped
        assert decode_key(name) == key
    else:
        assert len(name) == 153
        assert decode_key(name) is None


@given(keys, keys)
@example("x" * 300, "x" * 301)
@example("a/b", "a%2Fb")
@example("A", "a")
def test_different_keys_have_different_names(one: str, other: str) -> None:
    assert (encode_key(one) == encode_key(other)) == (one == other)


def test_names_that_another_hive_writer_escaped_less_are_understood() -> None:
    assert decode_key("Köln x.y") == "Köln x.y"
    assert decode_key("a%2fb") == "a/b"


@pytest.mark.parametrize("key", ["", "\ud800"])
def test_key_that_cannot_be_a_name_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="partition key"):
        encode_key(key)


@pytest.mark.parametrize("name", ["", "%FF"])
def test_name_that_cannot_be_a_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="partition name"):
        decode_key(name)


def test_output_and_temp_names_stay_within_what_a_disk_takes(tmp_path) -> None:
    store = open_store(tmp_path)
    store.prepare("space")
    name = file_name("space", "ü" * 300)
    with store.create(name) as upload:
        [temp] = [
            path.name for path in (tmp_path / "space").iterdir() if path.name.startswith(".tmp-")
        ]
        assert max(len(os.fsencode(temp)), len(os.fsencode(name.partition("/")[2]))) <= 255
        upload.sink.write(b"x")
        upload.publish(lambda: None)
    assert (tmp_path / name).exists()


@given(st.dictionaries(keys, keys | st.just(""), min_size=2, max_size=4))
def test_values_of_several_columns_are_read_back_from_their_key(values: dict[str, str]) -> None:
    assert dict(parse_qsl(joined_key(values).replace("/", "&"), keep_blank_values=True)) == values


def test_key_of_several_columns_is_readable_and_that_of_one_is_its_value() -> None:
    assert (
        joined_key({"lang": "de", "category": "shoes/Köln"}) == "lang=de/category=shoes%2FK%C3%B6ln"
    )
    assert joined_key({"category": "shoes/Köln"}) == "shoes/Köln"
