"""What the first rows of some partitions say about all of them.

That is bytes, tokens, equal texts, and unchanged ones. The largest partitions are read, which may
be unlike the others, and some of the others, which stand for those that are not read. They are
drawn with one seed: the same catalog has the same plan. Tokens are counted as workers count them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.encoder.speed import Call, Speed
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_tokens
from surge_dagster.engine.encoder.worker.tokenization import load_tokenizer
from surge_dagster.engine.errors import DataError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.failures import failure_of
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.content import IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch, read_rows
from surge_dagster.engine.support.text_hash import HASH_BYTES, text_hashes

_LARGEST_PARTITIONS = 16
_OTHER_PARTITIONS = 48
_ROWS = 16_384  # read of a partition
_BYTES = 4 << 20
_TOKENIZED_TEXTS = 4096  # of all partitions together
_TOKENIZED_BYTES = 16 << 20

CountTokens = Callable[[pa.Array], np.ndarray]  # tokens that the model reads of each text
IsReused = Callable[[int, pa.Array], np.ndarray]  # of texts of the partition at this place: bool


@dataclass(frozen=True, slots=True)
class CatalogSample:
    """What a catalog has; arrays have an entry for each partition.

    Attributes:
        rows: without those that a run skips.
        text_bytes: of all rows.
        other_bytes: of a row: its id and the columns that travel with it.
        rows_reused: rows whose texts are in the old file.
        texts: the other ones that were read, as one call, which took no time.
        texts_tokenized: how many of them were.
        partitions_read: how many were.
        refused: of the partition at this place: why a run will refuse its first rows.
    """

    rows: np.ndarray
    text_bytes: np.ndarray
    other_bytes: float
    rows_reused: np.ndarray
    texts: Call
    texts_tokenized: int
    partitions_read: int
    refused: Mapping[int, Failure]


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """The first rows of one partition.

    Attributes:
        rows: without those that a run skips.
        rows_read: with them.
        keys: hashes of the texts that need a vector.
        tokenized: places among these texts.
        tokens: of the tokenized texts.
    """

    rows: int
    rows_read: int
    text_bytes: int
    other_bytes: int
    keys: np.ndarray
    tokenized: np.ndarray
    tokens: np.ndarray


def token_counter(space: Space, speed: Speed) -> tuple[CountTokens, bool]:
    """Return what counts tokens, and whether it counts as the model does.

    A text of a model without a fast tokenizer has as many per byte as those of earlier runs.
    """
    if space.is_hash:
        prompt_bytes = len(space.prompt.encode())

        def count_hashed(texts: pa.Array) -> np.ndarray:
            return np.minimum(hash_tokens(text_sizes(texts) + prompt_bytes), space.max_length)

        return count_hashed, True

    tokenizer = load_tokenizer(space)
    if tokenizer is None:
        return tokens_by_bytes(speed), False
    return lambda texts: tokenizer.encode(texts.to_pylist()).lengths, True


def tokens_by_bytes(speed: Speed) -> CountTokens:
    """Return what gives texts as many tokens per byte as those of earlier runs had."""
    return lambda texts: text_sizes(texts) * speed.tokens_per_single_byte


def sample_catalog(
    partitions: Sequence[Partition],
    count_tokens: CountTokens,
    superbatch_texts: int = 0,
    old_rows: Sequence[int] | None = None,
    is_reused: IsReused | None = None,
) -> CatalogSample:
    """Read the first rows of some partitions; those whose rows are not counted are left out.

    Args:
        superbatch_texts: among so many, equal texts are encoded once; 0 is among all.
        old_rows: rows in the old file of each partition, 0 without one, which `is_reused` compares
            texts with.
    """
    rows = np.array([partition.rows or 0 for partition in partitions], float)
    listed = np.array([partition.text_bytes or 0 for partition in partitions], float)
    old = np.zeros(len(partitions)) if old_rows is None else np.asarray(old_rows, float)
    by_size = sorted(np.flatnonzero(rows).tolist(), key=lambda place: -rows[place])
    largest = by_size[:_LARGEST_PARTITIONS]
    others = by_size[_LARGEST_PARTITIONS:]
    drawn = random.Random(0).sample(others, min(len(others), _OTHER_PARTITIONS))

    reader = _Reader(partitions, count_tokens, len(largest) + len(drawn))
    for place in sorted([*largest, *drawn]):
        reader.read(place, is_reused if old[place] else None)
    read = list(reader.found.values())
    scaling = _scaling(rows, reader.found, largest)

    texts = rows
    if read:
        texts = scaling.of_all([first.rows for first in read], rows)
    reused = [first.rows - len(first.keys) for first in read]
    rows_reused = scaling.of_all(reused, np.where(old > 0, rows, 0.0))
    other_bytes = scaling.of_all([first.other_bytes for first in read], rows)
    sizes = [first.text_bytes for first in read]
    # What a source lists is an estimate, which is scaled: the size of a Parquet file counts its
    # other columns too.
    text_bytes = np.where(listed > 0, scaling.of_all(sizes, listed), scaling.of_all(sizes, rows))
    places = scaling.places
    return CatalogSample(
        rows=texts.round().astype(np.int64),
        text_bytes=text_bytes,
        other_bytes=float(other_bytes[places].sum() / max(1.0, texts[places].sum())),
        rows_reused=np.minimum(np.minimum(rows_reused, texts), old).round().astype(np.int64),
        texts=_as_call(read, scaling.weights(others), superbatch_texts),
        texts_tokenized=sum(len(first.tokens) for first in read),
        partitions_read=len(read),
        refused=reader.refused,
    )


class _Reader:
    """Reads the first rows of partitions.

    Attributes:
        found: of partitions that have rows, by their place.
        refused: see `CatalogSample`.
    """

    def __init__(
        self, partitions: Sequence[Partition], count_tokens: CountTokens, chosen: int
    ) -> None:
        self._partitions = partitions
        self._count_tokens = count_tokens
        self._chosen = chosen
        self.found = dict[int, _FirstRows]()
        self.refused = dict[int, Failure]()

    def read(self, place: int, is_reused: IsReused | None) -> None:
        partition = self._partitions[place]
        try:
            first = self._first_rows(place, is_reused)
        except DataError as error:
            failure = failure_of(partition, error)
            if not failure.transient:
                self.refused[place] = failure
            return
        except (SurgeError, OSError):
            return  # the run will say what is wrong
        if first.rows_read:
            self.found[place] = first

    def _first_rows(self, place: int, is_reused: IsReused | None) -> _FirstRows:
        partition = self._partitions[place]
        batches = list(first_rows(partition, _ROWS, _BYTES))
        ids = IdSet()
        for batch in batches:
            ids.add(batch.ids)
        refuse_repeated_id(partition, ids.repeated())

        no_texts = pa.array([], pa.large_string())
        texts = pa.concat_arrays([no_texts, *(batch.texts for batch in batches)])
        rows = len(texts)
        text_bytes = sum(len(batch.text_values) for batch in batches)
        if is_reused is not None:
            texts = texts.filter(pa.array(~is_reused(place, texts)))
        tokenized = self._chosen_texts(texts)
        hashes = text_hashes(texts).buffers()[1] or b""
        return _FirstRows(
            rows=rows,
            rows_read=rows + sum(batch.skipped for batch in batches),
            text_bytes=text_bytes,
            other_bytes=sum(batch.value_bytes for batch in batches) - text_bytes,
            keys=np.frombuffer(hashes, np.int64)[:: HASH_BYTES // 8],
            tokenized=tokenized,
            tokens=self._count_tokens(texts.take(pa.array(tokenized))),
        )

    def _chosen_texts(self, texts: pa.Array) -> np.ndarray:
        """Return the places of texts to tokenize, at equal distances."""
        if not len(texts):
            return np.zeros(0, int)
        mean_bytes = max(1.0, text_sizes(texts).mean())
        most = int(min(_TOKENIZED_TEXTS, _TOKENIZED_BYTES / mean_bytes) / self._chosen)
        return np.linspace(0, len(texts) - 1, min(len(texts), max(1, most))).astype(int)


def first_rows(
    partition: Partition, rows: int, most_bytes: float = float("inf")
) -> Iterator[RowBatch]:
    """Yield so many rows at most, up to the batch in which their bytes reach the most."""
    with contextlib.closing(iter(read_rows(partition))) as batches:  # pyright: ignore[reportArgumentType]
        for batch in batches:
            if len(batch) <= rows:
                yield batch
            else:
                skipped = batch.skipped * rows // len(batch)
                yield replace(batch.rows(0, rows), skipped=skipped)
            rows -= len(batch)
            most_bytes -= batch.value_bytes
            if rows <= 0 or most_bytes <= 0:
                return


@dataclass(frozen=True, slots=True)
class _Scaling:
    """How the partitions that were read stand for all.

    Attributes:
        rows: of all partitions.
        places: of those that were read.
        scale: rows of a partition over those that were read of it.
        is_drawn: whether a partition is not one of the largest.
    """

    rows: np.ndarray
    places: np.ndarray
    scale: np.ndarray
    is_drawn: np.ndarray

    def of_all(self, values: list[int], amounts: np.ndarray) -> np.ndarray:
        """Return a value for each partition from those of the rows that were read.

        The value of a partition that was not read is in proportion to its amount. The drawn ones
        stand for it, or all if there are no others.
        """
        found = self.scale * np.array(values, float)
        stands = self.is_drawn if self.is_drawn.any() else np.ones(len(found), np.bool_)
        standing_amounts = amounts[self.places[stands]]
        ratio = found[stands][standing_amounts > 0].sum() / max(1.0, standing_amounts.sum())
        result = amounts * ratio
        result[self.places] = found
        return result

    def weights(self, others: Sequence[int]) -> np.ndarray:
        """Return how often each row that was read counts; `others` are not the largest."""
        unread = self.rows[others].sum() / max(1.0, self.rows[self.places[self.is_drawn]].sum())
        return self.scale * np.where(self.is_drawn, unread, 1.0)


def _scaling(rows: np.ndarray, read: Mapping[int, _FirstRows], largest: Sequence[int]) -> _Scaling:
    places = np.array(list(read), int)
    scale = rows[places] / np.array([first.rows_read for first in read.values()])
    return _Scaling(rows, places, scale, ~np.isin(places, largest))


def _as_call(read: Sequence[_FirstRows], weights: np.ndarray, superbatch_texts: int) -> Call:
    """Return the texts that need a vector, each counted as often as its partition weighs.

    Their bytes are those of as many rows of the partition, as a forecast has no others.
    """
    texts = text_bytes = tokens = equal_texts = 0.0
    all_firsts = _firsts(read, superbatch_texts)
    for first, is_first, weight in zip(read, all_firsts, weights, strict=True):
        count = len(first.keys)
        distinct = int(is_first.sum())
        texts += weight * distinct
        equal_texts += weight * (count - distinct)
        text_bytes += weight * count * first.text_bytes / max(1, first.rows)
        if distinct:
            tokens += weight * distinct * _mean_tokens(first, is_first)
    return Call(texts, text_bytes, tokens, 0.0, equal_texts)


def _firsts(read: Sequence[_FirstRows], superbatch_texts: int) -> list[np.ndarray]:
    """Return for the texts of each partition that need a vector whether no earlier one is equal.

    Only texts of one SuperBatch are compared.
    """
    if not read:
        return []
    counts = np.array([len(first.keys) for first in read], int)
    keys = np.concatenate([first.keys for first in read])
    ends = np.cumsum(counts)
    superbatches = np.repeat(ends - counts, counts) // (superbatch_texts or len(keys) + 1)
    pairs = np.column_stack([superbatches, keys])
    places = np.unique(pairs, axis=0, return_index=True)[1]
    is_first = np.zeros(len(keys), np.bool_)
    is_first[places] = True
    return np.split(is_first, ends[:-1])


def _mean_tokens(read: _FirstRows, is_first: np.ndarray) -> float:
    """Return the mean tokens of texts that no earlier one equals, as far as they were counted."""
    counted = is_first[read.tokenized]
    tokens = read.tokens[counted] if counted.any() else read.tokens
    return float(tokens.mean())


def text_sizes(texts: pa.Array) -> np.ndarray:
    """Return the bytes of each text."""
    return pc.binary_length(texts).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
