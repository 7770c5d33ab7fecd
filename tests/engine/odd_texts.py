"""Texts of all lengths and of many scripts, some of which are truncated."""

from __future__ import annotations

import numpy as np

ODD_WORDS = [
    "steel",
    "Größe",
    "東京",
    "don't",
    "naïve",
    "3.14",
    "🚀",
    "bottle,",
    "(a)",
    "__init__",
]
_SPECIAL_WORDS = [*ODD_WORDS, "[SEP]"]
_SENTENCE = "Return the rows whose key stands in the index, in the order of the index. "


def short_texts(count: int = 40) -> list[str]:
    """Texts without words, a long one, and random ones."""
    rng = np.random.default_rng(7)
    texts = ["", " ", "a", "\n\t", "word " * 80]
    for size in rng.integers(1, 40, count):
        texts.append(" ".join(rng.choice(_SPECIAL_WORDS, int(size))))
    return texts


def odd_texts() -> list[str]:
    rng = np.random.default_rng(5)
    words = [*ODD_WORDS, "unbelievably"]
    texts = [
        "",
        " ",
        "a",
        "\n\t",
        "�",
        "e\u0301cole",
        "word " * 256,
        _SENTENCE * 40,
        "x" * 3_000,
        "東" * 400,
    ]
    texts += [" ".join(rng.choice(words, int(count))) for count in rng.integers(1, 30, 120)]
    texts += [_SENTENCE * int(count) for count in rng.integers(1, 20, 20)]
    return [texts[row] for row in rng.permutation(len(texts))]
