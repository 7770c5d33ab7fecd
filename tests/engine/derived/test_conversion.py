"""Derived vectors are those of sentence-transformers' `quantize_embeddings`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from surge_dagster.engine.derived.conversion import comparable, convert, cut
from surge_dagster.engine.model.spec import EncodingSpec

PARENT = EncodingSpec("hash://48").resolve()


def vectors(rows: int = 300) -> np.ndarray:
    drawn = np.random.default_rng(3).standard_normal((rows, 48), np.float32)
    drawn[:, 7] = 0.25  # a dimension with one value
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def test_int8_and_binary_are_those_of_sentence_transformers() -> None:
    quantization = pytest.importorskip(
        "sentence_transformers.util.quantization", reason="not installed: the extra cpu"
    )
    given = vectors()  # beyond the ranges: clipped
    beyond = vectors() * 1.5
    ranges = np.vstack([given.min(0), given.max(0)])
    int8 = PARENT.derive("int8", ranges=(tuple(ranges[0].tolist()), tuple(ranges[1].tolist())))
    for matrix in (given, beyond):
        stored = convert(matrix, int8)
        np.testing.assert_array_equal(
            stored, quantization.quantize_embeddings(matrix, "int8", ranges=ranges)
        )
        restored = quantization._dequantize_embeddings(stored, "int8", ranges)
        np.testing.assert_allclose(
            comparable(stored.view(np.uint8), int8), restored, rtol=1e-5, atol=1e-7
        )
        bits = convert(matrix, PARENT.derive("binary"))
        np.testing.assert_array_equal(bits, quantization.quantize_embeddings(matrix, "ubinary"))
        np.testing.assert_array_equal(comparable(bits, PARENT.derive("binary")) > 0, matrix > 0)


def test_cut_vectors_have_length_one_again_where_the_space_normalizes() -> None:
    given = vectors()
    short = PARENT.derive("float32", 16)
    given[3, :16] = 0
    made = cut(given, short)
    lengths = np.linalg.norm(given[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(made, given[:, :16] / np.where(lengths, lengths, 1), rtol=1e-6)
    assert not made[3].any(), "there is no direction to keep"
    assert cut(given, PARENT.derive("float16")) is given
    # as the memory of a file is; of one row, the leading part is contiguous
    given.flags.writeable = False
    np.testing.assert_array_equal(cut(given[:1], short), made[:1])
