"""The token ids of short texts, put together from those of their words.

BERT's tokenizer cuts a text into words, at white space and around punctuation, and none of its
steps looks beyond a word. So a word has the same ids in every text, and a catalog has few different
words: each is tokenized once. Arrow cuts all texts of a chunk into words. On one core this takes a
fifth of the library's time.
"""

from __future__ import annotations

import json
import re
import string
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute
from tokenizers import Tokenizer

compute: Any = pyarrow.compute  # its functions are made when it is imported
# Of longer texts the library reads only as much as the model does.
_LONGEST_TEXT = 2_000
_MOST_WORDS = 50_000
_PUNCTUATION = f"([{re.escape(string.punctuation)}])"


class WordCache:
    """The ids of words, for plain texts: of printable ASCII in which no added token can stand.

    Args:
        document: the content of a tokenizer.json of BERT's kind.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._lowers = bool(document["normalizer"].get("lowercase"))
        self._ids: dict[str, list[int]] = {}
        added = {token["content"][0] for token in document.get("added_tokens") or []}
        plain = {chr(code) for code in range(32, 127)} | set("\t\n\r")
        letters = re.escape("".join(sorted(plain - added)))
        self._plain = re.compile(f"[{letters}]{{0,{_LONGEST_TEXT}}}")

    def is_plain(self, text: str) -> bool:
        return self._plain.fullmatch(text) is not None

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of the words of each text, which are plain, without special tokens."""
        if self._lowers:
            texts = [text.lower() for text in texts]
        column = pa.array(texts, pa.large_string())
        spaced = compute.replace_substring_regex(column, pattern=_PUNCTUATION, replacement=r" \1 ")
        words = compute.ascii_split_whitespace(spaced)
        encoded = words.flatten().dictionary_encode()

        distinct = self._ids_of_words(encoded.dictionary.to_pylist())
        of_words = pa.array(distinct, pa.large_list(pa.int32())).take(encoded.indices)
        borders = of_words.offsets.to_numpy()[words.offsets.to_numpy()]
        flat = of_words.flatten().to_numpy().tolist()
        return [flat[start:stop] for start, stop in pairwise(borders.tolist())]

    def _ids_of_words(self, words: list[str]) -> list[list[int]]:
        known = self._ids
        if len(known) > _MOST_WORDS:
            known = self._ids = {}
        new = [word for word in words if word not in known]
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        known.update((word, found.ids) for word, found in zip(new, encodings, strict=True))
        return [known[word] for word in words]
