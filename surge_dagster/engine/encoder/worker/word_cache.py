"""The token ids of texts put together from those of their words, without Python strings of texts.

BERT's tokenizer cuts a text into words, at white space and around punctuation, and none of its
steps looks beyond a word. So a word has the same ids in every text, and a catalog has few different
words. Texts of printable ASCII in which no added token can stand are cut here, in whole chunks, and
each of their words is tokenized once. Other texts, and other tokenizers, go through the library.
"""

from __future__ import annotations

import json
import string
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

_LONGEST_TEXT = 64 << 10
_MOST_WORDS = 100_000
_LONGEST_KEPT_WORD = 64
_FEW_WORDS = 1_000
_NEW_SHARE = 0.4
_SPACE = 0
_PUNCTUATION = 1
_LETTER = 2
_KINDS = np.full(256, _LETTER, np.uint8)
_KINDS[[ord(space) for space in " \t\n\r"]] = _SPACE
_KINDS[[ord(mark) for mark in string.punctuation]] = _PUNCTUATION


class WordCache:
    """Args:
    prefix, suffix: ids around those of every text's words.
    room: the most ids of words that a text keeps.
    """

    def __init__(
        self, document: dict[str, Any], prefix: list[int], suffix: list[int], room: int
    ) -> None:
        self._tokenizer = Tokenizer.from_str(
            json.dumps(document | {"truncation": None, "padding": None})
        )
        self._prefix = np.array(prefix, np.int32)
        self._suffix = np.array(suffix, np.int32)
        self._room = room
        self._ids: dict[str, list[int]] = {}
        # Bytes that no text may have: another character than printable ASCII, or what an added
        # token begins with.
        self._foreign = np.ones(256, np.bool_)
        self._foreign[[*range(32, 127), *b"\t\n\r"]] = False
        self._foreign[
            [ord(token["content"][0]) for token in document.get("added_tokens") or []]
        ] = True
        self._letters = np.arange(256, dtype=np.uint8)
        if document["normalizer"].get("lowercase"):
            self._letters[65:91] += 32

    def fitting(self, data: np.ndarray, borders: np.ndarray) -> np.ndarray:
        """Return which texts can be put together; text i is `data[borders[i]:borders[i + 1]]`."""
        fits = np.diff(borders) <= _LONGEST_TEXT
        foreign = np.flatnonzero(self._foreign[data])
        fits[np.searchsorted(borders, foreign, side="right") - 1] = False
        return fits

    def encode(
        self, data: np.ndarray, borders: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Ids, their borders, and which texts were cut, of fitting texts; as in `Tokens`.

        None where too few words come again for this to be faster than the library.
        """
        words, counts = self._words(data, borders)
        distinct = words.dictionary_encode()
        which = distinct.indices.to_numpy(zero_copy_only=False)
        names = distinct.dictionary.to_pylist()
        new = [name for name in names if name not in self._ids]
        if len(new) > max(_FEW_WORDS, _NEW_SHARE * len(which)):
            return None
        pieces = self._ids_of(names, new)
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        flat = np.fromiter(chain.from_iterable(pieces), np.int32, int(lengths.sum()))
        ends = _before(lengths[which])
        ids_before = ends[_before(counts)]  # ids of words, before each text and at the end
        kept = np.minimum(np.diff(ids_before), self._room)
        found = _before(kept + len(self._prefix) + len(self._suffix))
        ids = np.empty(found[-1], np.int32)
        ids[found[:-1, None] + np.arange(len(self._prefix))] = self._prefix
        ids[found[1:, None] - len(self._suffix) + np.arange(len(self._suffix))] = self._suffix
        of_words = flat[_runs(_before(lengths)[which], lengths[which])]
        ids[_runs(found[:-1] + len(self._prefix), kept)] = of_words[_runs(ids_before[:-1], kept)]
        return ids, found, np.diff(ids_before) > self._room

    def _words(
        self, data: np.ndarray, borders: np.ndarray
    ) -> tuple[pa.LargeStringArray, np.ndarray]:
        """The words of all texts, and how many each text has."""
        kinds = _KINDS[data]
        is_word = kinds != _SPACE
        is_first = is_word.copy()
        is_first[1:] &= (kinds[1:] == _PUNCTUATION) | (kinds[:-1] != _LETTER)
        at_border = borders[:-1][np.diff(borders) > 0]
        is_first[at_border] = is_word[at_border]
        firsts = np.flatnonzero(is_first)
        letters = self._letters[data[is_word]]
        # Words follow each other without a space here: the place of each is the number of letters
        # before it.
        places = np.zeros(1, np.int64)
        if len(firsts):
            places = np.append(np.cumsum(is_word)[firsts] - 1, len(letters))
        words = pa.LargeStringArray.from_buffers(
            len(firsts), pa.py_buffer(places), pa.py_buffer(letters)
        )
        return words, np.diff(np.searchsorted(firsts, borders))

    def _ids_of(self, words: list[str], new: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        once = {word: encoding.ids for word, encoding in zip(new, encodings, strict=True)}
        found = [once.get(word) or self._ids[word] for word in words]
        if len(self._ids) + len(once) > _MOST_WORDS:
            self._ids.clear()
        short = (item for item in once.items() if len(item[0]) <= _LONGEST_KEPT_WORD)
        self._ids.update(islice(short, _MOST_WORDS))
        return found


def _before(counts: np.ndarray) -> np.ndarray:
    """The sum before each, and of all, int64 [n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers from each start on, one run after the other."""
    before = _before(lengths)
    return np.repeat(starts - before[:-1], lengths) + np.arange(before[-1])


def rows_of(
    data: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of these texts one behind the other, and their borders."""
    lengths = stops - starts
    if len(starts) and np.array_equal(starts[1:], stops[:-1]):
        return data[starts[0] : stops[-1]], _before(lengths)
    return data[_runs(starts, lengths)], _before(lengths)
