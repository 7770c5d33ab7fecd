"""Tokenization: texts to the token ids of sentence-transformers, with a flag for every cut text.

The tokenizer is that of the model loaded by sentence-transformers, as JSON. It returns up to one token more than the
model reads: a text with that many tokens is too long, and removing the extra token gives the same ids as truncation.

Very long texts are not tokenized to their end where the rest cannot change the result: BERT's tokenizer treats the
pieces between white space one by one, so a prefix that ends before white space and fills the model is enough.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from surge_dagster.engine.model.spec import Space

_CHARACTERS_PER_TOKEN = 8
_SPACE_SEARCH = 512


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of many texts, flat: text i is `ids[offsets[i]:offsets[i + 1]]`.

    Attributes:
        ids: int32.
        offsets: int64, one more than texts.
        truncated: bool, whether a text was longer than the model reads.
        pad_id: fills rows that are shorter than their batch.
    """

    ids: np.ndarray
    offsets: np.ndarray
    truncated: np.ndarray
    pad_id: int

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and attention mask of rows of at most `length` tokens, both [rows, length] int64, padded on the right."""
        columns = np.arange(length)
        starts = self.offsets[rows]
        mask = columns < (self.offsets[rows + 1] - starts)[:, None]
        if len(self.ids) == 0:  # only empty texts, without special tokens
            return np.full(mask.shape, self.pad_id, np.int64), mask.astype(np.int64)
        places = np.where(mask, starts[:, None] + columns, 0)
        return np.where(mask, self.ids[places], self.pad_id).astype(np.int64), mask.astype(np.int64)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A model's tokenizer and its settings.

    Attributes:
        tokenizer_json: a serialized `tokenizers.Tokenizer`.
        truncation_side: the end at which texts are cut, "right" or "left".
        pad_id: the token that pads.
        prompt_length: tokens of the prompt; None without a prompt, or where pooling does not need it.
    """

    tokenizer_json: str
    truncation_side: str = "right"
    pad_id: int = 0
    prompt_length: int | None = None


class TextTokenizer:
    """Tokenizes texts with the length and the prompt of a space."""

    def __init__(self, facts: TokenizerFacts, space: Space) -> None:
        max_length, on_the_right = space.max_length, facts.truncation_side == "right"
        self._tokenizer = Tokenizer.from_str(facts.tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        probe = self._tokenizer.encode("a").special_tokens_mask
        leading = probe.index(0) if 0 in probe else len(probe)
        trailing = probe[::-1].index(0) if 0 in probe else 0
        self._tokenizer.enable_truncation(max_length + 1, strategy="longest_first", direction=facts.truncation_side)
        # The position, in a text of max_length + 1 tokens, of the token that truncation would leave out.
        self._surplus = max_length - trailing if on_the_right else leading
        self._max_length = max_length
        self._prompt = space.prompt
        self._pad_id = facts.pad_id
        self._can_cut = on_the_right and _splits_at_spaces(json.loads(facts.tokenizer_json))

    def encode(self, texts: list[str]) -> Tokens:
        """The token ids of `texts`, cut to max_length."""
        if self._prompt:
            texts = [self._prompt + text for text in texts]
        if self._can_cut:
            enough = _CHARACTERS_PER_TOKEN * self._max_length
            texts = [text if len(text) <= 2 * enough else self._prefix(text, enough) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(texts)
        pieces = [encoding.ids for encoding in encodings]
        truncated = np.zeros(len(pieces), np.bool_)
        for row, piece in enumerate(pieces):
            if len(piece) > self._max_length:
                truncated[row] = True
                del piece[self._surplus]
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=offsets[1:])
        flat = array("i")
        for piece in pieces:
            flat.extend(piece)
        ids = np.frombuffer(flat, np.int32) if flat else np.empty(0, np.int32)
        return Tokens(ids, offsets, truncated, self._pad_id)

    def _prefix(self, text: str, characters: int) -> str:
        """A prefix of a long text that gives the same first max_length + 1 tokens."""
        while characters < len(text):
            end = _space_after(text, characters)
            if end is None:
                return text
            prefix = text[:end]
            if len(self._tokenizer.encode(prefix)) > self._max_length:
                return prefix
            characters = 2 * end
        return text


def _space_after(text: str, start: int) -> int | None:
    for position in range(start, min(start + _SPACE_SEARCH, len(text))):
        if text[position] == " ":
            return position
    return None


def _splits_at_spaces(tokenizer: dict[str, Any]) -> bool:
    """Whether tokens before a space are independent of the text after it, which is known for BERT's kind only."""
    kinds = [(tokenizer.get(part) or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
    added = [token["content"] for token in tokenizer.get("added_tokens") or []]
    return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"] and not any(" " in text for text in added)
