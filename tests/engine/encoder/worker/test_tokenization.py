"""Token ids: those of the tokenizer, cut where truncation would cut."""

from __future__ import annotations

import json
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from surge_dagster.engine.encoder.worker import tokenization
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts
from surge_dagster.engine.model.spec import EncodingSpec

LENGTH = 8
DIGEST = "b79c741907a22acc2ca397a2dcdcb9d2"


@pytest.fixture(scope="module")
def document(demo_folder: Path) -> str:
    return (demo_folder / "tokenizer.json").read_text()


def _tokenizer(document: str, prompt: str = "", side: str = "right") -> TextTokenizer:
    space = EncodingSpec("hash://8", max_length=LENGTH, document_prompt=prompt).resolve()
    return TextTokenizer(TokenizerFacts(document, truncation_side=side), space)


def _expected(
    document: str, texts: list[str], side: str = "right", length: int = LENGTH
) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(document)
    tokenizer.no_padding()
    tokenizer.enable_truncation(length, direction=side)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def _found(tokenizer: TextTokenizer, texts: list[str]) -> list[list[int]]:
    tokens = tokenizer.encode(texts)
    borders = tokens.offsets
    return [tokens.ids[borders[i] : borders[i + 1]].tolist() for i in range(len(texts))]


_TEXTS = [
    "",
    "a",
    "one two three four five six",
    "one two three four five six seven",
    "x " * 500,
    "unbelievable " * 90,
]


@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_equal_those_of_truncation_and_only_cut_texts_are_flagged(
    document: str, side: str
) -> None:
    tokenizer = _tokenizer(document, side=side)
    assert _found(tokenizer, _TEXTS) == _expected(document, _TEXTS, side)
    assert tokenizer.encode(_TEXTS).truncated.tolist() == [False, False, False, True, True, True]


def test_digest_of_tokens_tells_tokenizers_apart_and_not_spellings(document: str) -> None:
    written = json.loads(document)
    # On record in the space.json of every output of this model.
    assert _tokenizer(document).digest == DIGEST
    assert (
        _tokenizer(
            json.dumps(written | {"truncation": None, "padding": None}, indent=1), "q: "
        ).digest
        == DIGEST
    )
    changes: dict[str, Any] = {
        "normalizer": written["normalizer"] | {"lowercase": False},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "added_tokens": [
            *written["added_tokens"],
            written["added_tokens"][0] | {"id": 30522, "content": "<brand>"},
        ],
    }
    digests = {
        _tokenizer(json.dumps(written | {part: change})).digest for part, change in changes.items()
    }
    assert len(digests - {DIGEST}) == len(changes)


def test_prompt_precedes_every_text(document: str) -> None:
    tokenizer = _tokenizer(document, "query: ")
    assert _found(tokenizer, _TEXTS) == _expected(document, ["query: " + text for text in _TEXTS])


_CHOICES = [
    "Steel ",
    "ß",
    "[SEP]",
    "[",
    "x" * 100,
    "y" * 101,
    "don't",
    "\x0b",
    "\x7f",
    "東京 ",
    "\t",
    "##a",
    "_",
    " ",
    "Bottle,",
    "-7",
]
_MIXED = st.lists(
    st.text(string.printable, max_size=40) | st.lists(st.sampled_from(_CHOICES)).map("".join),
    max_size=30,
)


@cache
def _prompted(document: str, prompt: str, length: int) -> TextTokenizer:
    space = EncodingSpec("hash://8", max_length=length, document_prompt=prompt).resolve()
    return TextTokenizer(TokenizerFacts(document), space)


# Making a tokenizer takes far longer than a comparison. The smallest length leaves room for one
# token after a prompt.
@settings(max_examples=100)
@given(
    _MIXED,
    st.sampled_from(["", "query: ", "query:", "query"]),
    st.sampled_from([5, 6, 7, 40]),
)
def test_texts_put_together_from_words_have_the_library_s_ids(
    document: str, texts: list[str], prompt: str, length: int
) -> None:
    tokenizer = _prompted(document, prompt, length)
    prompted = [prompt + text for text in texts]
    expected = _expected(document, prompted, length=length)
    assert _found(tokenizer, texts) == expected
    many = tokenization._FEW_TEXTS + 1  # which Arrow cuts into words
    assert _found(tokenizer, texts * many) == expected * many


def test_only_texts_of_printable_ascii_without_added_tokens_are_put_together(document: str) -> None:
    words = _tokenizer(document)._words
    assert words is not None
    plain = ["steel\tmug\r\n", "", "~!", "x" * 2_000]
    assert [text for text in plain if not words.is_plain(text)] == []
    others = ["a\x7fb", "a\x1fb", "\x0b", "é", "[SEP]", "x" * 2_001]
    assert [text for text in others if words.is_plain(text)] == []


def test_words_are_tokenized_once(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer(document)
    tokenizer.encode(["steel mug"])
    asked: list[str] = []

    class Library:
        def encode_batch_fast(self, words: list[str], **_: Any) -> list[Any]:
            asked.extend(words)
            return []

    monkeypatch.setattr(tokenizer._words, "_tokenizer", Library())
    assert _found(tokenizer, ["mug steel"]) == _expected(document, ["mug steel"])
    assert asked == []


def test_kept_words_are_bounded(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer(document)
    words = tokenizer._words
    assert words is not None
    monkeypatch.setattr(tokenization, "_MOST_WORDS", 50)
    for number in range(20):
        texts = [f"item {number * 70 + row} and steel, {'z' * row}" for row in range(70)]
        assert _found(tokenizer, texts) == _expected(document, texts)
        assert len(words._ids) <= 50 + 150


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("normalizer", {"type": "NFC"}),
        ("added_tokens", [{"content": "steel", "id": 5, "special": True}]),
        ("added_tokens", [{"content": "日", "id": 5, "special": True}]),
    ],
)
def test_other_tokenizers_put_no_texts_together(document: str, part: str, change: Any) -> None:
    changed = json.loads(document) | {part: change}
    if part == "added_tokens":
        changed[part] = [{**json.loads(document)[part][0], **change[0]}]
    assert _tokenizer(document)._words is not None
    assert _tokenizer(json.dumps(changed))._words is None
    assert _tokenizer(document, side="left")._words is None


_ORDINARY = [
    "a",
    "Ünïcödé",
    "cafe\u0301",
    "\u0301",
    "東京",
    "don't",
    "x" * 40,
    "##",
    "\t",
    "\u3000",
    ".",
]
_ODD = ["_", "x" * 99, "x1" * 700, "e\u0301" * 60, "\x00", "\u00ad", "İ", "ß", "한국어", "สวัสดีครับ"]
_SPECIAL = ["[SEP]", "[SEP", "[", "]", "[MASK]", "Q" * 998 + "[CLS]"]
_WORDS = st.sampled_from(_ORDINARY + _ODD + _SPECIAL)


@pytest.fixture(scope="module")
def cutting(document: str) -> TextTokenizer:
    tokenizer = _tokenizer(document)
    assert tokenizer._word_end is not None
    return tokenizer


@pytest.fixture(scope="module")
def whole(document: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(document)
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    return tokenizer


@settings(max_examples=300)
@given(
    words=st.lists(_WORDS, max_size=120),
    between=st.sampled_from([" ", "  ", "", " \u0301", "\n", "/"]),
)
def test_long_texts_give_the_tokens_of_the_whole_text(
    cutting: TextTokenizer, whole: Tokenizer, words: list[str], between: str
) -> None:
    texts = [between.join(words) * repeats for repeats in (1, 7)]
    assert _found(cutting, texts) == [encoding.ids for encoding in whole.encode_batch(texts)]
    assert cutting.encode(texts).truncated.tolist() == [
        bool(each.overflowing) for each in whole.encode_batch(texts)
    ]


@pytest.mark.parametrize("unit", ["word ", "a,", "b\n", "東"])
def test_text_of_megabytes_is_tokenized_to_where_the_model_reads(
    cutting: TextTokenizer, whole: Tokenizer, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    seen: list[int] = []
    honest = cutting._pieces
    monkeypatch.setattr(
        cutting, "_pieces", lambda texts: seen.extend(map(len, texts)) or honest(texts)
    )
    text = unit * (4_000_000 // len(unit))
    assert _found(cutting, [text]) == [whole.encode(text[:20_000]).ids]
    assert max(seen) < 10_000


def test_prefixes_are_used_for_bert_tokenizers_only(document: str) -> None:
    other = json.loads(document)
    other["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}
    tokenizer = _tokenizer(json.dumps(other))
    assert tokenizer._word_end is None
    assert _found(tokenizer, _TEXTS) == _expected(json.dumps(other), _TEXTS)
