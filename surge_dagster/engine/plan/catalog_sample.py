"""What the first rows of some partitions say about all of them.

That is bytes, tokens, equal texts, and unchanged ones. Up to 64 groups are read: a group is one
partition, or neighbors with at most 128 rows together, because a SuperBatch has these together and
encodes their equal texts once. The groups lie at equal distances in the bytes of the catalog, so a
large one is more likely to be read, and its weight is the number of groups that it stands for. The
same catalog has the same plan. Tokens are counted as workers count them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.speed import Call, Speed
from surge_dagster.engine.encoder.worker.backends import hash_tokens
from surge_dagster.engine.encoder.worker.tokenization import load_tokenizer
from surge_dagster.engine.errors import DataError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import Failure, failure_of
from surge_dagster.engine.sources.partition import (
    IdSet,
    Partition,
    RowBatch,
    read_rows,
    refuse_repeated_id,
)
from surge_dagster.engine.support.values import value_lengths

_GROUPS = 64  # a mean over them is off by an eighth of their spread
_GROUP_ROWS = 128  # of neighbors: few of the 1,000 texts or more of their SuperBatch
_PARTITIONS = 512  # about so many are opened, if groups have several
_ROWS = 16_384  # read of a partition; with `_BYTES`, a plan reads at most 256 MiB
_BYTES = 4 << 20
_TOKENIZED_TEXTS = 4096  # of all partitions together; their mean is off by 1/64 of their spread
_TOKENIZED_BYTES = 16 << 20  # four seconds of processor

CountTokens = Callable[[pa.Array], np.ndarray]  # tokens that the model reads of each text
IsReused = Callable[[pa.Array], np.ndarray]  # of texts of a partition: bool


@dataclass(frozen=True, slots=True)
class CatalogSample:
    """What a catalog has. Arrays have an entry for each partition, from the mean of all.

    Attributes:
        rows: without those that a run skips.
        text_bytes: of all rows.
        rows_reused: rows whose texts are in the old file.
        texts: the texts of the whole catalog that need a vector, as one call, without its time.
        texts_tokenized: how many texts were tokenized.
        partitions_read: how many partitions were read.
        refused: why a run will refuse partitions, by their places.
    """

    rows: np.ndarray
    text_bytes: np.ndarray
    rows_reused: np.ndarray
    texts: Call
    texts_tokenized: int
    partitions_read: int
    refused: Mapping[int, Failure]


@dataclass(frozen=True, slots=True)
class _GroupSample:
    """The first rows of a group of partitions.

    Attributes:
        partitions: how many were read.
        listed_rows, listed_bytes: of the group, as its source lists them.
        rows: rows read, without those that a run skips or rejects.
        rows_read: all rows read.
        rows_with_file: rows read of partitions that have an old file.
        reused: rows whose texts are in the old files.
        distinct: how many different texts the other rows have.
        tokens: mean of these texts.
        tokenized: of how many of them it is the mean.
    """

    partitions: int
    listed_rows: float
    listed_bytes: float
    rows: int
    rows_read: int
    rows_with_file: int
    text_bytes: int
    reused: int
    distinct: int
    tokens: float
    tokenized: int


def token_counter(space: Space, speed: Speed) -> tuple[CountTokens, bool]:
    """Return what counts tokens, and whether it counts as the model does.

    A text of a model without a fast tokenizer has as many per byte as those of earlier runs.
    """
    if space.is_hash:
        prompt_bytes = len(space.prompt.encode())

        def count_hashed(texts: pa.Array) -> np.ndarray:
            return np.minimum(hash_tokens(value_lengths(texts) + prompt_bytes), space.max_length)

        return count_hashed, True

    tokenizer = load_tokenizer(space)
    if tokenizer is None:
        return tokens_by_bytes(speed), False
    return lambda texts: tokenizer.encode(texts.to_pylist()).lengths, True


def tokens_by_bytes(speed: Speed) -> CountTokens:
    """Return what gives texts as many tokens per byte as those of earlier runs had."""
    return lambda texts: value_lengths(texts) * speed.tokens_per_single_byte


def sample_catalog(
    partitions: Sequence[Partition],
    count_tokens: CountTokens,
    reuse: Sequence[IsReused | None] | None = None,
) -> CatalogSample:
    """Read the first rows of some partitions; those whose rows are not counted are left out.

    Args:
        reuse: what finds texts in the old file of each partition; None for one without.
    """
    rows = np.array([partition.source_rows or 0 for partition in partitions], float)
    sizes = _sizes(partitions, rows)
    groups, weights = _chosen(sizes, _groups(rows))
    reuse = reuse or [None] * len(partitions)
    reader = _Reader(partitions, sizes, reuse, count_tokens)
    shares = weights * [sizes[group].sum() for group in groups] / max(1.0, sizes.sum())
    read = [reader.sample(group, share) for group, share in zip(groups, shares, strict=True)]

    has_rows = [sample is not None for sample in read]
    samples = [sample for sample in read if sample is not None]
    has_file = np.array([each is not None for each in reuse], np.bool_)
    return _extrapolated(samples, weights[has_rows], rows, sizes, has_file, reader.refused)


def _extrapolated(
    samples: Sequence[_GroupSample],
    weights: np.ndarray,
    rows: np.ndarray,
    sizes: np.ndarray,
    has_file: np.ndarray,
    refused: Mapping[int, Failure],
) -> CatalogSample:
    """Return what the catalog has if each group is like those that were read for it.

    Args:
        weights: how many groups each sample stands for.
        rows, sizes: listed rows and bytes of each partition of the catalog.
        has_file: whether it has an old file.
    """
    listed_rows = weights * [sample.listed_rows for sample in samples]
    listed_bytes = weights * [sample.listed_bytes for sample in samples]
    # rows of the catalog for each row that was read
    stands_for = listed_rows / [sample.rows_read for sample in samples]
    kept = stands_for * [sample.rows for sample in samples]
    kept_with_file = stands_for * [sample.rows_with_file for sample in samples]
    text_bytes = stands_for * [sample.text_bytes for sample in samples]
    reused = stands_for * [sample.reused for sample in samples]

    kept_rows = rows * _ratio(kept, listed_rows, unknown=1.0)
    rows_reused = kept_rows * has_file * _ratio(reused, kept_with_file)
    return CatalogSample(
        rows=kept_rows.round().astype(np.int64),
        text_bytes=sizes * _ratio(text_bytes, listed_bytes),
        rows_reused=rows_reused.round().astype(np.int64),
        texts=_as_call(samples, stands_for),
        texts_tokenized=sum(sample.tokenized for sample in samples),
        partitions_read=sum(sample.partitions for sample in samples),
        refused=refused,
    )


def _sizes(partitions: Sequence[Partition], rows: np.ndarray) -> np.ndarray:
    """Return the bytes of the partitions as their source lists them, or their rows."""
    listed = np.array([partition.text_bytes or 0 for partition in partitions], float)
    if listed[rows > 0].all():
        return np.where(rows > 0, listed, 0)
    return rows.copy()


def _groups(rows: np.ndarray) -> np.ndarray:
    """Return the place of the first partition of each group of neighbors."""
    starts = [0]
    group_rows = 0
    for place, count in enumerate(rows.tolist()):
        if group_rows and group_rows + count > _GROUP_ROWS:
            starts.append(place)
            group_rows = 0
        group_rows += count
    return np.array(starts)


def _chosen(sizes: np.ndarray, starts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the partitions of some groups, and for how many groups like it each stands.

    Args:
        starts: of all groups.
    """
    filled = [group[sizes[group] > 0] for group in np.split(np.arange(len(sizes)), starts[1:])]
    groups = [group for group in filled if len(group)]
    partitions = sum(map(len, groups))
    wanted = min(_GROUPS, max(1, _PARTITIONS * len(groups) // max(1, partitions)))
    if len(groups) <= wanted:
        return groups, np.ones(len(groups))
    group_sizes = np.array([sizes[group].sum() for group in groups])
    distance = group_sizes.sum() / wanted
    points = distance * (np.arange(wanted) + 0.5)
    places, counts = np.unique(np.searchsorted(np.cumsum(group_sizes), points), return_counts=True)
    weights = counts * distance / group_sizes[places]
    return [groups[place] for place in places.tolist()], weights


def _ratio(parts: np.ndarray, wholes: np.ndarray, unknown: float = 0.0) -> float:
    whole = wholes.sum()
    return float(parts.sum() / whole) if whole else unknown


class _Reader:
    """Reads first rows of partitions.

    Attributes:
        refused: why a run will refuse partitions, by their places.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        sizes: np.ndarray,
        reuse: Sequence[IsReused | None],
        count_tokens: CountTokens,
    ) -> None:
        self.refused: dict[int, Failure] = {}
        self._partitions = partitions
        self._sizes = sizes
        self._reuse = reuse
        self._count_tokens = count_tokens

    def sample(self, group: np.ndarray, share: float) -> _GroupSample | None:
        """Return what a plan needs of the partitions at these places; None if none has rows.

        Args:
            share: of the texts to tokenize, for what the group stands for.
        """
        read, places = self._read_group(group)
        if not read:
            return None
        new_texts = [self._new_texts(place, batches) for place, batches in read.items()]
        distinct = pa.concat_arrays(new_texts).unique()
        tokenized = _to_tokenize(distinct, share)
        tokens = self._count_tokens(distinct.take(pa.array(tokenized)))
        batches = list(chain.from_iterable(read.values()))
        rows = sum(map(len, batches))
        rejected = sum(len(batch.rejected) for batch in batches)
        with_file = [read[place] for place in read if self._reuse[place] is not None]
        return _GroupSample(
            partitions=len(read),
            listed_rows=sum(self._partitions[place].source_rows or 0 for place in places),
            listed_bytes=float(self._sizes[places].sum()),
            rows=rows,
            rows_read=rejected + sum(batch.source_rows + batch.skipped for batch in batches),
            rows_with_file=sum(map(len, chain.from_iterable(with_file))),
            text_bytes=sum(len(batch.text_values) for batch in batches),
            reused=rows - sum(map(len, new_texts)),
            distinct=len(distinct),
            tokens=float(tokens.mean()) if len(tokens) else 0.0,
            tokenized=len(tokens),
        )

    def _read_group(self, group: np.ndarray) -> tuple[dict[int, list[RowBatch]], list[int]]:
        """Return the first rows of partitions, and the places of all that these stand for: those
        that can be read, or that come after enough bytes."""
        read: dict[int, list[RowBatch]] = {}
        places: list[int] = group.tolist()
        read_bytes = 0
        for place in group.tolist():
            if read_bytes > _BYTES:
                break
            batches = self._read(place)
            if any(len(batch) + batch.skipped for batch in batches):
                read[place] = batches
                read_bytes += sum(batch.value_bytes for batch in batches)
            else:
                places.remove(place)
        return read, places

    def _new_texts(self, place: int, batches: Sequence[RowBatch]) -> pa.Array:
        """Return the texts that are not in the partition's old file."""
        texts = pa.concat_arrays([batch.texts for batch in batches])
        is_reused = self._reuse[place]
        if is_reused is None:
            return texts
        return texts.filter(pa.array(~is_reused(texts)))

    def _read(self, place: int) -> list[RowBatch]:
        """Return the first rows of a partition; none if it cannot be read."""
        partition = self._partitions[place]
        try:
            batches = list(first_rows(partition, _ROWS, _BYTES))
            ids = IdSet()
            for batch in batches:
                ids.add(batch.ids)
            refuse_repeated_id(partition, ids.repeated())
        except DataError as error:
            failure = failure_of(partition, error)
            if not failure.transient:
                self.refused[place] = failure
            return []
        except (SurgeError, OSError):
            return []  # the run will say what is wrong
        return batches


def _to_tokenize(texts: pa.Array, share: float) -> np.ndarray:
    """Return the places of texts to tokenize, at equal distances."""
    if not len(texts):
        return np.zeros(0, int)
    mean_bytes = max(1.0, value_lengths(texts).mean())
    most = int(min(_TOKENIZED_TEXTS, _TOKENIZED_BYTES / mean_bytes) * share)
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
                yield replace(
                    batch.rows(0, rows),
                    source_rows=-(-batch.source_rows * rows // len(batch)),
                    skipped=batch.skipped * rows // len(batch),
                )
            rows -= len(batch)
            most_bytes -= batch.value_bytes
            if rows <= 0 or most_bytes <= 0:
                return


def _as_call(read: Sequence[_GroupSample], weights: np.ndarray) -> Call:
    """Return the texts that need a vector, each for as many rows of the catalog as `weights` say.

    Their bytes are those of as many rows of the group, as a forecast has no others.
    """
    texts = text_bytes = tokens = equal_texts = 0.0
    for sample, weight in zip(read, weights.tolist(), strict=True):
        count = sample.rows - sample.reused
        texts += weight * sample.distinct
        equal_texts += weight * (count - sample.distinct)
        text_bytes += weight * count * sample.text_bytes / max(1, sample.rows)
        tokens += weight * sample.distinct * sample.tokens
    return Call(texts, text_bytes, tokens, 0.0, equal_texts)
