"""Where a document is cut into chunks that the model reads in full.

The library semantic-text-splitter cuts at headings of Markdown, else between paragraphs, sentences
or words, at the largest of these that fits. The model's own tokenizer counts: a text is tokenized
once, and the library asks for the tokens of its parts. A chunk is tokenized once more with the
prompt and the rest of its template, because texts that are put together may have other tokens than
each of them, and is cut again if it is too long.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer

from surge_dagster.engine.chunks.boundaries import sections
from surge_dagster.engine.encoder.worker.tokenization import tokenizer_of
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.chunk_rule import ChunkFormat, ChunkRule
from surge_dagster.engine.model.digest import file_sha256, json_sha256
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

_CHUNKS_PER_SECTION = 5
_CHARACTERS_PER_TOKEN = 4  # about, in English
# A text with more for each token of a chunk is cut without counting the tokens of the whole text.
_MOST_CHARACTERS_PER_TOKEN = 16
_LEAST_ROOM = 4  # tokens; a character of bytes may have as many
_NEXT_WORD = re.compile(r"\s(?=\S)")
_SECTIONS_AT_ONCE = 16
_COUNTED_AT_ONCE = 256  # texts; the library keeps 100 bytes or more for each of their tokens
# Texts that splitters may cut in different ways. The digest of what becomes of them is part of the
# identity of spaces: do not change them.
_PROBES = (
    "# Bottles\n\nA steel bottle. It keeps 750 ml cold, e.g. water; isn't it?\n\n## Care\n\n"
    "* rinse\n* dry\n\n> Do not heat.\n\n```\nx = 1\n\ny = 2\n```\n\n| a | b |\n|---|---|\n",
    "Erster Satz. Zweiter Satz!  Dritter\tSatz?\r\n\r\nNeuer Absatz\u00a0ohne Punkt\n\n\n  Schluss",
    "東京の夜景は美しい。大阪の食べ物もおいしい。 Пример текста. مثال 🚀🚀 e\u0301te\u0301 " * 3,
    "antidisestablishmentarianism" * 12,
)
_PROBE_CHARACTERS = (12, 40, 100)


class Chunk(NamedTuple):
    """A part of a document, in characters of its text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Document:
    """A text to cut.

    Attributes:
        start, stop: the part that is cut, in characters; each chunk repeats the rest.
    """

    text: str
    start: int
    stop: int

    def with_chunk(self, chunk: Chunk) -> str:
        """Return the text with only this chunk of the part that is cut."""
        inside = self.text[chunk.start : chunk.stop]
        return self.text[: self.start] + inside + self.text[self.stop :]


class NoRoom(Exception):
    """The rest of a template leaves chunks no room.

    Attributes:
        place: of the document.
        tokens: of the rest, with prompt and special tokens.
    """

    def __init__(self, place: int, tokens: int) -> None:
        super().__init__(place, tokens)
        self.place = place
        self.tokens = tokens


class _CannotBeCut(Exception):
    """A chunk of one token is too long with the rest of its text."""


class _Ruler:
    """Counts the tokens of parts of a text, which the library cuts from its start to its end,
    without tokenizing each part anew.

    Args:
        starts: of the text's tokens, in characters.
    """

    def __init__(self, text: str, starts: Sequence[int]) -> None:
        self._text = text
        self._starts = starts
        self._place = 0  # no part begins before it

    def __call__(self, part: str) -> int:
        self._place = self._text.index(part, self._place)
        first = bisect_left(self._starts, self._place)
        return bisect_left(self._starts, self._place + len(part)) - first


class Splitter:
    """Cuts documents into chunks of a space.

    Attributes:
        tokens: of a chunk at most, with prompt and special tokens.
    """

    def __init__(self, space: Space) -> None:
        rule = space.requested.chunks
        assert rule is not None
        self.tokens = rule.tokens or space.max_length
        digest = splitter_digest(rule.format)
        if rule.splitter != digest:
            raise ConfigError(
                f"the space {space.name} has chunks of another version of semantic-text-splitter: "
                f"it cut texts in another way (digest {rule.splitter!r}) than the installed one "
                f"({digest!r}). Install the version that it was made with."
            )
        self._rule = rule
        self._prompt = space.document_prompt
        self._kind = _kinds()[rule.format]
        self._tokenizer = Tokenizer.from_file(str(_tokenizer_of(space, rule)))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def split(self, documents: Sequence[Document]) -> list[list[Chunk]]:
        """Return the chunks of each document.

        Without an overlap they follow each other from `start` to `stop`. A document has at least
        one chunk, which is empty if the part to cut is.

        Raises:
            NoRoom: the rest of a document's template leaves chunks no room.
        """
        chunks: list[list[Chunk]] = []
        for place, fits in enumerate(self._fit_whole(documents)):
            document = documents[place]
            if fits:
                chunks.append([Chunk(document.start, document.stop)])
            else:
                chunks.append(self._overlapping(document, self._cut(place, document)))
        return chunks

    @property
    def _most_tokens(self) -> int:
        """The limit of a chunk before it gets its overlap."""
        return self.tokens - self._rule.overlap

    def _fit_whole(self, documents: Sequence[Document]) -> Iterator[bool]:
        """Yield for each document whether it is one chunk; very long ones are not tokenized."""
        longest = _MOST_CHARACTERS_PER_TOKEN * self.tokens
        texts = [document.text if len(document.text) <= longest else "" for document in documents]
        for text, document, tokens in zip(texts, documents, self._lengths(texts), strict=True):
            is_counted = len(text) == len(document.text)
            yield is_counted and tokens <= self._most_tokens

    def _cut(self, place: int, document: Document) -> list[Chunk]:
        [rest] = self._lengths([document.with_chunk(Chunk(0, 0))])
        room = self._most_tokens - rest
        if room < _LEAST_ROOM:
            raise NoRoom(place, rest)

        inside = document.text[document.start : document.stop]
        starts = [document.start + start for start in self._starts_in_sections(inside, room)]
        try:
            return list(self._short_enough(document, _between(starts, document.stop), room))
        except _CannotBeCut:
            raise NoRoom(place, rest) from None

    def _starts_in_sections(self, text: str, room: int) -> list[int]:
        """Return where the parts of a long text start, which is cut in sections first."""
        # The mean length of sections is about twice their least distance.
        distance = self.tokens * _CHARACTERS_PER_TOKEN * _CHUNKS_PER_SECTION // 2
        begins = sections(text, distance, self._rule.format)
        texts = [text[start:stop] for start, stop in pairwise([*begins, len(text)])]
        starts: list[int] = []
        for begin, section, ruler in zip(begins, texts, self._rulers(texts), strict=True):
            starts += [begin + start for start in self._starts(section, ruler, room)]
        return starts

    def _rulers(self, texts: Iterable[str]) -> Iterator[_Ruler]:
        """Yield a ruler for each text, without the prompt and special tokens."""
        remaining = iter(texts)
        while batch := list(islice(remaining, _SECTIONS_AT_ONCE)):
            tokenized = self._tokenizer.encode_batch(batch, add_special_tokens=False)
            for text, encoded in zip(batch, tokenized, strict=True):
                yield _Ruler(text, [start for start, _ in encoded.offsets])

    def _starts(self, text: str, ruler: _Ruler, room: int) -> list[int]:
        """Return where the parts of a text start, each of at most `room` tokens."""
        splitter = self._kind.from_callback(ruler, room, trim=False)
        return [start for start, _ in splitter.chunk_indices(text)] or [0]

    def _short_enough(
        self, document: Document, chunks: Sequence[Chunk], room: int
    ) -> Iterator[Chunk]:
        """Yield the chunks; those that are too long in the whole text are cut again."""
        texts = map(document.with_chunk, chunks)
        for chunk, tokens in zip(chunks, self._lengths(texts), strict=True):
            if tokens <= self._most_tokens:
                yield chunk
                continue
            if room == 1:
                raise _CannotBeCut
            text = document.text[chunk.start : chunk.stop]
            [ruler] = self._rulers([text])
            # With two thirds of the room, a chunk that is a little too long becomes two.
            smaller = min(room - 1, math.ceil(room * 2 / 3))
            starts = [chunk.start + start for start in self._starts(text, ruler, smaller)]
            yield from self._short_enough(document, _between(starts, chunk.stop), smaller)

    def _overlapping(self, document: Document, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks, each with the last words of the one before it."""
        if not self._rule.overlap:
            return chunks
        longer = [chunks[0]]
        for before, chunk in pairwise(chunks):
            longer.append(Chunk(self._begin(document, before), chunk.stop))
        lengths = self._lengths(map(document.with_chunk, longer))
        return [
            more if tokens <= self.tokens else chunk
            for chunk, more, tokens in zip(chunks, longer, lengths, strict=True)
        ]

    def _begin(self, document: Document, chunk: Chunk) -> int:
        """Return where the last words of a chunk begin that the next one repeats."""
        text = document.text[chunk.start : chunk.stop]
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        character = 0
        if len(offsets) > self._rule.overlap:
            character = offsets[-self._rule.overlap][0]
            word = _NEXT_WORD.search(text, character - 1)
            if word is not None:
                character = word.end()
        return chunk.start + character

    def _lengths(self, texts: Iterable[str]) -> Iterator[int]:
        """Yield the tokens of each text with the prompt and special tokens."""
        remaining = iter(texts)
        while batch := [self._prompt + text for text in islice(remaining, _COUNTED_AT_ONCE)]:
            for encoded in self._tokenizer.encode_batch_fast(batch):
                yield len(encoded.ids)


def _tokenizer_of(space: Space, rule: ChunkRule) -> Path:
    """Return the file of the tokenizer that counts."""
    endpoint = space.requested.endpoint
    if endpoint is not None:
        endpoint.require_tokenizer("chunks")
    file = tokenizer_of(space)
    assert file is not None  # else the spec was refused
    if endpoint is not None and file_sha256(file) != rule.tokenizer:
        raise ConfigError(
            f"{file} is not the tokenizer that cut the chunks of the space {space.name}. Restore "
            "it, or write to another output."
        )
    return file


def _between(starts: Sequence[int], stop: int) -> list[Chunk]:
    return [Chunk(*borders) for borders in pairwise([*starts, stop])]


def _kinds() -> dict[ChunkFormat, type[TextSplitter] | type[MarkdownSplitter]]:
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError as error:
        raise ConfigError(
            f"chunks need the package semantic-text-splitter ({error}): "
            "pip install 'surge-dagster[chunks]'"
        ) from None
    return {"text": TextSplitter, "markdown": MarkdownSplitter}


@cache
def splitter_digest(text_format: ChunkFormat = "text") -> str:
    """Return a digest of where the installed library cuts certain texts, for `ChunkRule`.

    Raises:
        ConfigError: the library is not installed.
    """
    kind = _kinds()[text_format]
    cuts = [
        kind(capacity, trim=False).chunk_indices(text)
        for capacity in _PROBE_CHARACTERS
        for text in _PROBES
    ]
    return json_sha256(cuts)[:16]
