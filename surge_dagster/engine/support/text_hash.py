"""The hash of a text, by which rows with equal texts are found without comparing the texts."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

import pyarrow as pa

from surge_dagster.engine.support.values import value_parts

HASH_BYTES = 16
TEXT_HASH = pa.binary(HASH_BYTES)
_ROWS = 4096  # hashed at a time, since each hash is a Python object of 49 bytes until it is joined


def text_hashes(texts: pa.Array) -> pa.FixedSizeBinaryArray:
    """The BLAKE2b hash of each text's UTF-8 bytes: 16 bytes that hold against texts made to
    collide, 0.7 µs a row."""
    offsets, values = value_parts(texts)
    hashes = bytearray()
    for start in range(0, len(texts), _ROWS):
        ends = (offsets[start : start + _ROWS + 1] - offsets[0]).tolist()
        first = ends[0]
        content = bytes(values[first : ends[-1]])
        hashes += b"".join(
            [
                blake2b(content[begin - first : end - first], digest_size=HASH_BYTES).digest()
                for begin, end in pairwise(ends)
            ]
        )
    return pa.Array.from_buffers(TEXT_HASH, len(texts), [None, pa.py_buffer(hashes)])  # pyright: ignore[reportReturnType]
