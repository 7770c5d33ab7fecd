"""The hash of a text does not depend on how the texts lie in memory."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.support.text_hash import TEXT_HASH, hash_keys, text_hashes


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("rows", [0, 1, 8191, 8192, 40_000])
def test_each_text_has_the_hash_of_its_own_bytes(rows: int, kind: pa.DataType) -> None:
    texts = ["first", "", "naïve", *(f"text {row}" for row in range(rows + 3))]
    part = slice(1, rows + 1)
    found = text_hashes(pa.array(texts, kind)[part])
    found.validate(full=True)
    assert found.type == TEXT_HASH and found.null_count == 0
    assert found.to_pylist() == [sha256(text.encode()).digest()[:16] for text in texts[part]]


def test_key_is_the_first_half_of_a_hash_in_a_slice_too() -> None:
    texts = [f"text {row}" for row in range(20)]
    halves = b"".join([sha256(text.encode()).digest()[:8] for text in texts])

    keys = hash_keys(text_hashes(pa.array(texts))[5:15])

    assert keys.tolist() == np.frombuffer(halves, np.int64)[5:15].tolist()
