"""Tokenization: texts to the token ids of sentence-transformers, with a flag for every cut text.

The tokenizer returns up to one token more than the model reads: a text with that many tokens is too
long, and removing the extra token gives the same ids as truncation.

Very long texts are not tokenized to their end where the rest cannot change the result. BERT's
tokenizer cuts texts into words first, at white space, punctuation and Chinese characters, and none
of its steps looks beyond a word. So a prefix that ends before such a character is enough if it has
more tokens than the model reads. Other tokenizers may look anywhere. Their long texts are tokenized
one at a time, since each takes many times its size.

For the same reason a word has the same ids in every text of BERT's kind, and a catalog has few
different words: each is tokenized once (`WordCache`). Arrow cuts the texts of a portion into words,
if they are not only a few. On one core this takes a fifth of the library's time.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from itertools import chain, compress, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from tokenizers import Tokenizer

from surge_dagster.engine.model.digest import json_sha256
from surge_dagster.engine.model.folder import tokenizer_file
from surge_dagster.engine.model.spec import Space

compute: Any = pyarrow.compute  # its functions are made when it is imported
_CHARACTERS_PER_TOKEN = 8
_LONG_CHARACTERS = 64 * 1024
# Of longer texts the library reads only as much as the model does.
_LONGEST_PLAIN_TEXT = 2_000
_MOST_WORDS = 50_000
# Arrow's calls take 50 µs for any number of texts, and the cutting of one in Python 2 to 6 µs. Of
# more texts it would keep the interpreter's other threads waiting.
_FEW_TEXTS = 16
_PUNCTUATION = f"([{re.escape(string.punctuation)}])"
# Texts that tokenizers treat apart. The tokens of these are on record in each space.json: do not
# change them.
PROBES = (
    "Stainless steel Bottle, 750 ml (black): keeps drinks cold; don't, we'll, I'M",
    "Größe 43, naïve façade, Ærøskøbing, e\u0301te\u0301, ﬁne Ⅳ \uff46\uff55ll ½",
    "東京の夜景 пример текста مثال 🚀🚀 हिन्दी 한국어 " + "antidisestablishmentarianism" * 8,
    " two  spaces\tand a tab\r\nline\u00a0no-break\u200bzero\ufffd\x07 1234567 3.14 1,000 ",
    "def f(x: int) -> str:\n    return f'{x!r}'  "
    "# <s> </s> <pad> <unk> <mask> [CLS] [SEP] [PAD] [UNK] [MASK]",
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids (int32) of many texts, flat: text i is `ids[offsets[i]:offsets[i + 1]]`.

    `truncated` says whether a text was longer than the model reads; `pad_id` fills rows shorter
    than their batch.
    """

    ids: np.ndarray
    offsets: np.ndarray
    truncated: np.ndarray
    pad_id: int

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and attention mask, [rows, length] int64, padded on the right."""
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
        truncation_side: the end at which texts are cut, "right" or "left".
        prompt_length: tokens of the prompt; None without a prompt, or where pooling does not need
            it.
    """

    tokenizer_json: str
    truncation_side: str = "right"
    pad_id: int = 0
    prompt_length: int | None = None


class TextTokenizer:
    def __init__(self, facts: TokenizerFacts, space: Space) -> None:
        max_length = space.max_length
        on_the_right = facts.truncation_side == "right"
        self.truncation_side = facts.truncation_side
        self._tokenizer = Tokenizer.from_str(facts.tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        document = json.loads(facts.tokenizer_json)
        added = [[token["content"], token["id"]] for token in document.get("added_tokens") or []]
        self.digest = digest_of_tokens(
            [[self._tokenizer.encode(text).ids for text in PROBES], added]
        )
        probe = self._tokenizer.encode("a").special_tokens_mask
        leading = probe.index(0) if 0 in probe else len(probe)
        trailing = probe[::-1].index(0) if 0 in probe else 0
        self._tokenizer.enable_truncation(
            max_length + 1, strategy="longest_first", direction=facts.truncation_side
        )
        # The position, in a text of max_length + 1 tokens, of the token that truncation would leave
        # out.
        self._surplus = max_length - trailing if on_the_right else leading
        self._max_length = max_length
        self._prompt = space.prompt
        self._pad_id = facts.pad_id
        self._word_end = _word_end(document) if on_the_right else None
        self._words: WordCache | None = None
        if self._word_end is not None and all(text[0] in string.punctuation for text, _ in added):
            self._words = WordCache(document)
        # Around the words of a text, of which one more is kept than the model reads.
        around = self._tokenizer.encode("").ids
        self._before = around[:leading]
        self._after = around[leading:]
        self._words_kept = max_length + 1 - leading - trailing

    def read_ids(self, data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Tokens:
        """Return the ids, int32, that are the bytes `data[starts[i]:stops[i]]`.

        They were cut where they were made, so none counts as truncated here.
        """
        borders = zip(starts.tolist(), stops.tolist(), strict=True)
        ids = np.concatenate([data[start:stop] for start, stop in borders]).view(np.int32)
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum((stops - starts) // ids.itemsize, out=offsets[1:])
        return Tokens(ids, offsets, np.zeros(len(starts), np.bool_), self._pad_id)

    def encode(self, texts: list[str]) -> Tokens:
        if self._prompt:
            texts = [self._prompt + text for text in texts]
        if self._word_end is not None:
            enough = _CHARACTERS_PER_TOKEN * self._max_length
            texts = [self._prefix(text, enough, self._word_end) for text in texts]
        pieces = self._pieces(texts)
        truncated = np.zeros(len(pieces), np.bool_)
        for row, piece in enumerate(pieces):
            if len(piece) > self._max_length:
                truncated[row] = True
                del piece[self._surplus]
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=offsets[1:])
        ids = np.fromiter(chain.from_iterable(pieces), np.int32, int(offsets[-1]))
        return Tokens(ids, offsets, truncated, self._pad_id)

    def _pieces(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, at most one more than the model reads."""
        if self._words is None:
            return self._library_ids(texts)
        are_plain = [self._words.is_plain(text) for text in texts]
        plain = list(compress(texts, are_plain))
        others = [text for text, is_plain in zip(texts, are_plain, strict=True) if not is_plain]
        ids_of_plain = iter(self._words.ids(plain))
        ids_of_others = iter(self._library_ids(others))

        pieces = list[list[int]]()
        for is_plain in are_plain:
            if is_plain:
                ids = next(ids_of_plain)[: self._words_kept]
                pieces.append([*self._before, *ids, *self._after])
            else:
                pieces.append(next(ids_of_others))
        return pieces

    def _library_ids(self, texts: list[str]) -> list[list[int]]:
        if max(map(len, texts), default=0) <= _LONG_CHARACTERS:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        return [self._tokenizer.encode_batch_fast([text])[0].ids for text in texts]

    def _prefix(self, text: str, characters: int, word_end: re.Pattern[str]) -> str:
        """Return a text of the same first max_length + 1 tokens as a long one."""
        if len(text) <= 2 * characters:
            return text
        while (end := word_end.search(text, characters)) is not None:
            prefix = text[: end.start()]
            if len(self._tokenizer.encode(prefix)) > self._max_length:
                return prefix
            characters = 2 * end.start()
        return text


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
        self._punctuation = re.compile(_PUNCTUATION)
        added = {token["content"][0] for token in document.get("added_tokens") or []}
        plain = {chr(code) for code in range(32, 127)} | set("\t\n\r")
        letters = re.escape("".join(sorted(plain - added)))
        self._plain = re.compile(f"[{letters}]{{0,{_LONGEST_PLAIN_TEXT}}}")

    def is_plain(self, text: str) -> bool:
        return self._plain.fullmatch(text) is not None

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of the words of each text, which are plain, without special tokens."""
        if self._lowers:
            texts = [text.lower() for text in texts]
        if len(texts) <= _FEW_TEXTS:
            return self._ids_of_few(texts)
        column = pa.array(texts, pa.large_string())
        spaced = compute.replace_substring_regex(column, pattern=_PUNCTUATION, replacement=r" \1 ")
        words = compute.ascii_split_whitespace(spaced)
        encoded = words.flatten().dictionary_encode()

        distinct = self._ids_of_words(encoded.dictionary.to_pylist())
        of_words = pa.array(distinct, pa.large_list(pa.int32())).take(encoded.indices)
        borders = of_words.offsets.to_numpy()[words.offsets.to_numpy()]
        flat = of_words.flatten().to_numpy().tolist()
        return [flat[start:stop] for start, stop in pairwise(borders.tolist())]

    def _ids_of_few(self, texts: list[str]) -> list[list[int]]:
        spaced = [self._punctuation.sub(r" \1 ", text) for text in texts]
        words = [text.split() for text in spaced]
        ids = iter(self._ids_of_words(list(chain.from_iterable(words))))
        return [list(chain.from_iterable(islice(ids, len(of_text)))) for of_text in words]

    def _ids_of_words(self, words: list[str]) -> list[list[int]]:
        known = self._ids
        if len(known) > _MOST_WORDS:
            known = self._ids = {}
        new = [word for word in words if word not in known]
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        known.update((word, found.ids) for word, found in zip(new, encodings, strict=True))
        return [known[word] for word in words]


def tokenizer_of(space: Space) -> Path | None:
    """Return the tokenizer.json of a model's folder, or the one that counts for an endpoint; None
    if there is none."""
    endpoint = space.requested.endpoint
    if endpoint is None:
        return tokenizer_file(Path(space.model_path))
    return endpoint.tokenizer_file()


def load_tokenizer(space: Space, truncation_side: str = "right") -> TextTokenizer | None:
    """Return the tokenizer of `tokenizer_of`; None if there is no fast one."""
    file = tokenizer_of(space)
    if file is None:
        return None
    return TextTokenizer(TokenizerFacts(file.read_text("utf-8"), truncation_side), space)


def digest_of_tokens(tokens: list[Any]) -> str:
    """Return a digest of what a tokenizer makes of `PROBES`.

    Its own document is written in another way by other versions of the library.
    """
    return json_sha256(tokens)[:32]


def _word_end(tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """Return what finds characters before which a word ends; None for others than BERT's kind."""
    parts = {part: tokenizer.get(part) or {} for part in ("normalizer", "pre_tokenizer", "model")}
    if [part.get("type") for part in parts.values()] != [
        "BertNormalizer",
        "BertPreTokenizer",
        "WordPiece",
    ]:
        return None
    # Added tokens are looked for before anything else, so no word ends within one, and one that has
    # to be a single word depends on the character after it.
    added = tokenizer.get("added_tokens") or []
    names = [token["content"] for token in added]
    ends = set(" \t\n\r" + string.punctuation).difference("_", *names)
    chinese = ""
    is_simple = not any(token.get("single_word") for token in added) and "".join(names).isascii()
    if parts["normalizer"].get("handle_chinese_chars") and is_simple:
        chinese = "\u4e00-\u9fff"
    return re.compile(f"[{re.escape(''.join(sorted(ends)))}{chinese}]")
