"""What the first rows of some partitions say about all of them.

That is bytes, tokens, equal texts, and unchanged ones. At most 64 partitions are read, which lie at
equal distances in the bytes of the catalog: a large one is more likely to be read, and stands for
no more than any other. The same catalog has the same plan. Tokens are counted as workers count
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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

_PARTITIONS = 64
_ROWS = 16_384  # read of a partition
_BYTES = 4 << 20
_TOKENIZED_TEXTS = 4096  # of all partitions together
_TOKENIZED_BYTES = 16 << 20

CountTokens = Callable[[pa.Array], np.ndarray]  # tokens that the model reads of each text
IsReused = Callable[[pa.Array], np.ndarray]  # of texts of a partition: bool


@dataclass(frozen=True, slots=True)
class CatalogSample:
    """What a catalog has. Arrays have an entry for each partition, from the mean of all.

    Attributes:
        rows: without those that a run skips.
        text_bytes: of all rows.
        rows_reused: rows whose texts are in the old file.
        texts: the other ones that were read, as one call, which took no time.
        texts_tokenized: how many of them were.
        partitions_read: how many were.
        refused: of the partition at this place: why a run will refuse its first rows.
    """

    rows: np.ndarray
    text_bytes: np.ndarray
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
        reused: texts that are in the old file.
        distinct: how many different texts the others have.
        tokens: mean of these.
        tokenized: for how many of them it was counted.
    """

    rows: int
    rows_read: int
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
    reuse: Sequence[IsReused | None] | None = None,
) -> CatalogSample:
    """Read the first rows of some partitions; those whose rows are not counted are left out.

    Args:
        reuse: what finds texts in the old file of each partition; None for one without.
    """
    rows = np.array([partition.source_rows or 0 for partition in partitions], float)
    sizes = _sizes(partitions, rows)
    chosen, weights = _chosen(sizes)
    reuse = reuse or [None] * len(partitions)
    read, refused = _read(partitions, chosen, count_tokens, reuse)

    places = np.array(list(read), int)
    firsts = list(read.values())
    weights = weights[np.isin(chosen, places)]
    # Each row that was read stands for so many of the catalog.
    stands_for = weights * rows[places] / [first.rows_read for first in firsts]
    kept = stands_for * [first.rows for first in firsts]
    text_bytes = stands_for * [first.text_bytes for first in firsts]
    reused = stands_for * [first.reused for first in firsts]

    rows *= _ratio(kept, weights * rows[places], unknown=1.0)
    has_file = np.array([each is not None for each in reuse], np.bool_)
    rows_reused = rows * has_file * _ratio(reused, kept[has_file[places]])
    return CatalogSample(
        rows=rows.round().astype(np.int64),
        text_bytes=sizes * _ratio(text_bytes, weights * sizes[places]),
        rows_reused=rows_reused.round().astype(np.int64),
        texts=_as_call(firsts, stands_for),
        texts_tokenized=sum(first.tokenized for first in firsts),
        partitions_read=len(firsts),
        refused=refused,
    )


def _sizes(partitions: Sequence[Partition], rows: np.ndarray) -> np.ndarray:
    """Return the bytes of the partitions as their source lists them, or their rows."""
    listed = np.array([partition.text_bytes or 0 for partition in partitions], float)
    if listed[rows > 0].all():
        return np.where(rows > 0, listed, 0)
    return rows.copy()


def _chosen(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of some partitions, and for how many like it each stands."""
    filled = np.flatnonzero(sizes)
    if len(filled) <= _PARTITIONS:
        return filled, np.ones(len(filled))
    distance = sizes.sum() / _PARTITIONS
    points = distance * (np.arange(_PARTITIONS) + 0.5)
    places, counts = np.unique(np.searchsorted(np.cumsum(sizes), points), return_counts=True)
    return places, counts * distance / sizes[places]


def _ratio(parts: np.ndarray, wholes: np.ndarray, unknown: float = 0.0) -> float:
    whole = wholes.sum()
    return float(parts.sum() / whole) if whole else unknown


def _read(
    partitions: Sequence[Partition],
    chosen: np.ndarray,
    count_tokens: CountTokens,
    reuse: Sequence[IsReused | None],
) -> tuple[dict[int, _FirstRows], dict[int, Failure]]:
    """Return the first rows of these partitions by place, and why a run refuses some of them."""
    read: dict[int, _FirstRows] = {}
    refused: dict[int, Failure] = {}
    for place in chosen.tolist():
        partition = partitions[place]
        try:
            batches = list(first_rows(partition, _ROWS, _BYTES))
            ids = IdSet()
            for batch in batches:
                ids.add(batch.ids)
            refuse_repeated_id(partition, ids.repeated())
        except DataError as error:
            failure = failure_of(partition, error)
            if not failure.transient:
                refused[place] = failure
        except (SurgeError, OSError):
            continue  # the run will say what is wrong
        else:
            if any(len(batch) + batch.skipped for batch in batches):
                read[place] = _first_rows(batches, count_tokens, len(chosen), reuse[place])
    return read, refused


def _first_rows(
    batches: Sequence[RowBatch], count_tokens: CountTokens, chosen: int, is_reused: IsReused | None
) -> _FirstRows:
    """Return what a plan needs of some rows.

    Args:
        chosen: among so many partitions the texts to tokenize are divided.
    """
    texts = pa.concat_arrays([batch.texts for batch in batches])
    rows = len(texts)
    text_bytes = sum(len(batch.text_values) for batch in batches)
    if is_reused is not None:
        texts = texts.filter(pa.array(~is_reused(texts)))
    distinct = texts.unique()
    tokenized = _to_tokenize(distinct, chosen)
    tokens = count_tokens(distinct.take(pa.array(tokenized)))
    return _FirstRows(
        rows=rows,
        rows_read=sum(batch.source_rows + batch.skipped + len(batch.rejected) for batch in batches),
        text_bytes=text_bytes,
        reused=rows - len(texts),
        distinct=len(distinct),
        tokens=float(tokens.mean()) if len(tokens) else 0.0,
        tokenized=len(tokens),
    )


def _to_tokenize(texts: pa.Array, chosen: int) -> np.ndarray:
    """Return the places of texts to tokenize, at equal distances."""
    if not len(texts):
        return np.zeros(0, int)
    mean_bytes = max(1.0, text_sizes(texts).mean())
    most = int(min(_TOKENIZED_TEXTS, _TOKENIZED_BYTES / mean_bytes) / chosen)
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


def _as_call(read: Sequence[_FirstRows], weights: np.ndarray) -> Call:
    """Return the texts that need a vector, each counted as often as its partition weighs.

    Their bytes are those of as many rows of the partition, as a forecast has no others.
    """
    texts = text_bytes = tokens = equal_texts = 0.0
    for first, weight in zip(read, weights.tolist(), strict=True):
        count = first.rows - first.reused
        texts += weight * first.distinct
        equal_texts += weight * (count - first.distinct)
        text_bytes += weight * count * first.text_bytes / max(1, first.rows)
        tokens += weight * first.distinct * first.tokens
    return Call(texts, text_bytes, tokens, 0.0, equal_texts)


def text_sizes(texts: pa.Array) -> np.ndarray:
    """Return the bytes of each text."""
    return pc.binary_length(texts).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
