"""A source without texts that are longer than the model reads: they refuse their partition, or are
set aside.

Each text is tokenized here and again in the worker, so that what is left out is known before the
rows get their digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np

from surge_dagster.engine.encoder.worker.backends import hash_tokens
from surge_dagster.engine.encoder.worker.tokenization import load_tokenizer
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.sources.bad_rows import Reasons, without_bad_rows
from surge_dagster.engine.sources.partition import Partition, RowBatch, Source, row_in_words

LongText = Literal["truncate", "refuse", "set_aside"]


class LengthCheck:
    """Finds the texts that the model of a space reads only in part.

    Raises:
        ConfigError: the model has no tokenizer that counts.
    """

    def __init__(self, space: Space) -> None:
        self.max_length = space.max_length
        self._prompt_bytes = len(space.prompt.encode())
        self._tokenizer = None if space.is_hash else load_tokenizer(space)
        if self._tokenizer is None and not space.is_hash:
            raise ConfigError(
                "long_text needs a model with a fast tokenizer (tokenizer.json); "
                f"{space.requested.model} has none. Use another model, or set it to truncate."
            )

    def is_too_long(self, batch: RowBatch) -> np.ndarray:
        """Return which texts are too long, bool [rows]."""
        if self._tokenizer is None:
            sizes = np.diff(batch.text_offsets) + self._prompt_bytes
            return hash_tokens(sizes) > self.max_length
        return self._tokenizer.encode(batch.texts.to_pylist()).truncated


@dataclass(frozen=True, slots=True)
class ShortTexts:
    """A source whose texts the model reads in full.

    Attributes:
        texts: the source of all texts.
        check: called in the process that reads a partition, when it does.
    """

    texts: Source
    check: Callable[[], LengthCheck]
    long_text: LongText

    @property
    def url(self) -> str:
        return self.texts.url

    def __iter__(self) -> Iterator[Partition]:
        for partition in self.texts:
            yield replace(
                partition,
                source_version=self._version(partition.source_version),
                current_source_version=partial(self._current_version, partition),
                read=partial(self._read, partition),
                read_range=None,
            )

    def _version(self, version: str) -> str:
        separator = "&" if "?" in version else "?"
        return f"{version}{separator}long_text={self.long_text}"

    def _current_version(self, partition: Partition) -> str | None:
        version = partition.current_source_version()
        return None if version is None else self._version(version)

    def _read(self, partition: Partition) -> Iterator[RowBatch]:
        check = self.check()
        first_row = 0
        for batch in partition.read():
            numbers = batch.row_numbers(first_row)
            place = partial(_place, batch, numbers)
            reasons = Reasons(len(batch))
            reasons.add(
                check.is_too_long(batch),
                f"the text has more than the {check.max_length:,} tokens that the model reads",
                "Shorten it in the source, set long_text to set_aside or truncate, or set chunks "
                "to make several rows of it.",
            )
            if self.long_text == "refuse":
                reasons.require_none(partition.key, numbers, place)
            yield without_bad_rows(batch, reasons, numbers, place)
            first_row += len(batch) + batch.skipped + len(batch.rejected)


def _place(batch: RowBatch, numbers: np.ndarray, number: int) -> str:
    if batch.place is None:
        return row_in_words(number)
    return batch.place(int(np.searchsorted(numbers, number)))


def without_long_texts(texts: Source, spec: EncodingSpec, long_text: LongText) -> Source:
    """Return the source without the texts that a spec's model reads only in part, unless they are
    to be truncated."""
    if long_text == "truncate":
        return texts
    return ShortTexts(texts, cache(lambda: LengthCheck(spec.resolve())), long_text)
