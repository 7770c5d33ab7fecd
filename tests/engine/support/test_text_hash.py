"""The hash of a text does not depend on how the texts lie in memory."""

from __future__ import annotations

from hashlib import blake2b

import pyarrow as pa
import pytest

from surge_dagster.engine.support.text_hash import TEXT_HASH, text_hashes


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("rows", [0, 1, 4096, 9001])
def test_each_text_has_the_blake2b_hash_of_its_own_bytes(rows: int, kind: pa.DataType) -> None:
    texts = ["", "naïve", *(f"text {row}" for row in range(rows + 3))]
    part = slice(1, rows + 1)
    found = text_hashes(pa.array(texts, kind)[part])
    found.validate(full=True)
    assert found.type == TEXT_HASH and found.null_count == 0
    assert found.to_pylist() == [
        blake2b(text.encode(), digest_size=16).digest() for text in texts[part]
    ]
