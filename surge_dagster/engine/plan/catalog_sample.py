"""What the first rows of some partitions say about all of them: bytes, tokens, equal texts, and
unchanged ones.

The largest partitions are read, which may be unlike the others, and some of the others, which stand
for those that are not read. They are drawn with one seed: the same catalog has the same plan.
Tokens are counted by the model's tokenizer.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.encoder.costs import Call, EncodeCosts
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_tokens
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts
from surge_dagster.engine.errors import DataError, SurgeError
from surge_dagster.engine.model.folder import tokenizer_file
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.failures import failure_of
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.content import IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch, read_rows
from surge_dagster.engine.support.text_hash import HASH_BYTES, text_hashes

_LARGEST_PARTITIONS, _OTHER_PARTITIONS = 16, 48
_ROWS, _BYTES = 16_384, 4 << 20  # read of a partition
_TOKENIZED_TEXTS, _TOKENIZED_BYTES = 4096, 16 << 20  # of all partitions together
# no text has more of them on average, so that what follows is not tokenized
_CHARACTERS_PER_TOKEN = 32
_SPECIAL_BYTES = 8  # that take as many tokens as the special ones of a text

CountTokens = Callable[[pa.Array], np.ndarray]  # tokens that the model reads of each text
IsReused = Callable[[int, pa.Array], np.ndarray]  # of texts of the partition at this place: bool


@dataclass(frozen=True, slots=True)
class CatalogSample:
    """Arrays have an entry for each partition.

    Attributes:
        rows: without those that a run skips.
        text_bytes: of all rows.
        beside_bytes: of a row: its id and the columns that travel with it.
        rows_reused: rows whose texts are in the old file.
        texts: the other ones that were read, as one call, which took no time.
        texts_tokenized: how many of them were.
        partitions_read: how many were.
        refused: of the partition at this place: why a run will refuse its first rows.
    """

    rows: np.ndarray
    text_bytes: np.ndarray
    beside_bytes: float
    rows_reused: np.ndarray
    texts: Call
    texts_tokenized: int
    partitions_read: int
    refused: Mapping[int, Failure]


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """Of one partition; `rows` leaves out those that a run skips, which `rows_read` counts.

    `sizes` and `keys` are those of the texts that need a vector, `tokenized` places among them.
    """

    rows: int
    rows_read: int
    text_bytes: int
    beside_bytes: int
    sizes: np.ndarray
    keys: np.ndarray
    tokenized: np.ndarray
    tokens: np.ndarray


def token_counter(space: Space, costs: EncodeCosts) -> tuple[CountTokens, bool]:
    """Counts tokens, and whether as the model does; a model without a fast tokenizer: as many as
    its runs had."""
    if space.is_hash:
        prompt, most = len(space.prompt.encode()), space.max_length
        return lambda texts: np.minimum(hash_tokens(text_sizes(texts) + prompt), most), True
    file = tokenizer_file(Path(space.model_path))
    if file is None:
        return tokens_by_bytes(costs), False
    tokenizer = TextTokenizer(TokenizerFacts(file.read_text("utf-8")), space)
    end = _CHARACTERS_PER_TOKEN * space.max_length
    return lambda texts: tokenizer.encode([text[:end] for text in texts.to_pylist()]).lengths, True


def tokens_by_bytes(costs: EncodeCosts) -> CountTokens:
    """As many tokens per byte as the texts of earlier runs had."""
    return lambda texts: text_sizes(texts) * costs.tokens_per_single_byte


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
    known = sorted(np.flatnonzero(rows).tolist(), key=lambda place: -rows[place])
    largest, others = known[:_LARGEST_PARTITIONS], known[_LARGEST_PARTITIONS:]
    chosen = sorted(largest + random.Random(0).sample(others, min(len(others), _OTHER_PARTITIONS)))
    read, refused = dict[int, _FirstRows](), dict[int, Failure]()
    for place in chosen:
        compare = is_reused if old[place] else None
        try:
            first = _read(place, partitions[place], count_tokens, compare, len(chosen))
            if first.rows_read:
                read[place] = first
        except (SurgeError, OSError) as error:
            # Of other errors, and of sources that are being replaced, the run will say what is
            # wrong.
            if (
                isinstance(error, DataError)
                and not (failure := failure_of(partitions[place], error)).transient
            ):
                refused[place] = failure
    places = np.array(list(read), int)
    is_drawn = ~np.isin(places, largest)
    scale = rows[places] / np.array([first.rows_read for first in read.values()])
    # Those drawn stand for those that were not read, or all do where there are no others.
    standing = is_drawn if is_drawn.any() else np.ones(len(places), np.bool_)

    def of_all(values: list[int], amounts: np.ndarray) -> np.ndarray:
        """What the rows read have, for each partition; of one not read it is in proportion to its
        amount."""
        found = scale * np.array(values, float)
        result = amounts * (
            found[standing & (amounts[places] > 0)].sum()
            / max(1.0, amounts[places[standing]].sum())
        )
        result[places] = found
        return result

    texts = of_all([first.rows for first in read.values()], rows) if read else rows
    sizes = [first.text_bytes for first in read.values()]
    beside = of_all([first.beside_bytes for first in read.values()], rows)
    reused = of_all(
        [first.rows - len(first.keys) for first in read.values()], np.where(old > 0, rows, 0.0)
    )
    unread = sum(rows[others]) / max(1.0, rows[places[is_drawn]].sum())
    return CatalogSample(
        rows=texts.round().astype(np.int64),
        # What a source lists is an estimate, which is scaled: the size of a Parquet file counts its
        # other columns too.
        text_bytes=np.where(listed > 0, of_all(sizes, listed), of_all(sizes, rows)),
        beside_bytes=float(beside[places].sum() / max(1.0, texts[places].sum())),
        rows_reused=np.minimum(np.minimum(reused, texts), old).round().astype(np.int64),
        texts=_as_call(
            list(read.values()), scale * np.where(is_drawn, unread, 1.0), superbatch_texts
        ),
        texts_tokenized=sum(len(first.tokens) for first in read.values()),
        partitions_read=len(read),
        refused=refused,
    )


def first_rows(
    partition: Partition, rows: int, most_bytes: float = float("inf")
) -> Iterator[RowBatch]:
    """So many rows at most, and none behind the batch in which their bytes reach the most."""
    with contextlib.closing(iter(read_rows(partition))) as batches:  # pyright: ignore[reportArgumentType]
        for batch in batches:
            whole = len(batch) <= rows
            yield (
                batch
                if whole
                else replace(batch.rows(0, rows), skipped=batch.skipped * rows // len(batch))
            )
            rows, most_bytes = rows - len(batch), most_bytes - batch.value_bytes
            if rows <= 0 or most_bytes <= 0:
                return


def _read(
    place: int,
    partition: Partition,
    count_tokens: CountTokens,
    is_reused: IsReused | None,
    partitions: int,
) -> _FirstRows:
    batches, ids = list(first_rows(partition, _ROWS, _BYTES)), IdSet()
    for batch in batches:
        ids.add(batch.ids)
    refuse_repeated_id(partition, ids.repeated())
    texts = pa.concat_arrays([pa.array([], pa.large_string()), *(batch.texts for batch in batches)])
    rows, text_bytes = len(texts), sum(len(batch.text_values) for batch in batches)
    if is_reused is not None:
        texts = texts.filter(pa.array(~is_reused(place, texts)))
    sizes = text_sizes(texts)
    most = min(_TOKENIZED_TEXTS, _TOKENIZED_BYTES / max(1.0, sizes.mean())) if len(texts) else 0
    tokenized = np.linspace(
        0, len(texts) - 1, min(len(texts), max(1, int(most / partitions)))
    ).astype(int)
    return _FirstRows(
        rows=rows,
        rows_read=rows + sum(batch.skipped for batch in batches),
        text_bytes=text_bytes,
        beside_bytes=sum(batch.value_bytes for batch in batches) - text_bytes,
        sizes=sizes,
        keys=np.frombuffer(text_hashes(texts).buffers()[1] or b"", np.int64)[:: HASH_BYTES // 8],
        tokenized=tokenized,
        tokens=count_tokens(texts.take(pa.array(tokenized))),
    )


def _as_call(read: Sequence[_FirstRows], weights: np.ndarray, superbatch_texts: int) -> Call:
    """The texts that need a vector, each counted as often as its partition weighs; none took any
    time.

    Their bytes are those of as many rows of the partition, as a forecast knows no others.
    """
    firsts = _firsts(read, superbatch_texts)
    counts = np.array([len(first.keys) for first in read], float)
    texts = np.array([is_first.sum() for is_first in firsts], float)
    tokens = np.array([_tokens(*each) for each in zip(read, firsts, strict=True)], float)
    row_bytes = np.array([first.text_bytes / max(1, first.rows) for first in read])
    of_partitions = np.array([texts, row_bytes * counts, tokens, counts - texts])
    texts, text_bytes, tokens, equal = (of_partitions * weights).sum(axis=1).tolist()
    return Call(texts, text_bytes, tokens, 0.0, equal)


def _firsts(read: Sequence[_FirstRows], superbatch_texts: int) -> list[np.ndarray]:
    """Of the texts of each partition that need a vector: whether none before it equals it, among so
    many."""
    counts = np.array([len(first.keys) for first in read], int)
    keys = np.concatenate([np.empty(0, np.int64), *(first.keys for first in read)])
    superbatches = np.repeat(np.cumsum(counts) - counts, counts) // (
        superbatch_texts or len(keys) + 1
    )
    is_first = np.zeros(len(keys), np.bool_)
    is_first[np.unique(np.column_stack([superbatches, keys]), axis=0, return_index=True)[1]] = True
    return np.split(is_first, np.cumsum(counts)[:-1]) if len(read) else []


def _tokens(read: _FirstRows, is_first: np.ndarray) -> float:
    """Tokens of those texts of a partition that no text before them equals, from those that were
    tokenized.

    A text has tokens in proportion to its bytes, up to the most that the model reads.
    """
    counted = is_first[read.tokenized]
    if not counted.any():
        return 0.0 if not is_first.any() else float(read.tokens.mean() * is_first.sum())
    sizes, tokens, most = _SPECIAL_BYTES + read.sizes, read.tokens[counted], read.tokens.max()
    whole, of_counted = tokens < most, sizes[read.tokenized[counted]]
    ratio = tokens[whole].sum() / of_counted[whole].sum() if whole.any() else float(most)
    expected = np.minimum(ratio * sizes, most)
    return float(
        expected[is_first].sum() * tokens.sum() / max(1e-9, expected[read.tokenized[counted]].sum())
    )


def text_sizes(texts: pa.Array) -> np.ndarray:
    """Bytes of each text."""
    return pc.binary_length(texts).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
