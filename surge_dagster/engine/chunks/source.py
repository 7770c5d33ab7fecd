"""A source whose rows are chunks of the documents of another one.

The id of a chunk is that of its document, `#`, and its number. Its document, its number and its
place are further columns. Everything after the source works with chunks as with any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.chunks.splitting import Chunk, Document, NoRoom, Splitter
from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.sources.partition import Partition, RejectedRow, RowBatch, Source
from surge_dagster.engine.sources.selection import Selection

COLUMNS = ("document_id", "chunk", "start", "end")
_GROUP_CHARACTERS = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChunkedSource:
    """A source in chunks.

    Attributes:
        documents: the source of the documents, whose selection has the `passage` that is cut.
        splitter: called in the process that reads a partition, when it does.
    """

    documents: Source
    splitter: Callable[[], Splitter]

    @property
    def url(self) -> str:
        return self.documents.url

    def __iter__(self) -> Iterator[Partition]:
        for partition in self.documents:
            yield replace(
                partition,
                read=partial(_chunks, partition, self.splitter),
                rows=None,
                read_range=None,
            )


def in_chunks(documents: Source, spec: EncodingSpec) -> Source:
    """Return the source with the rows of a spec, which are chunks if it says so.

    The model is looked for when a partition is read.
    """
    if spec.chunks is None:
        return documents
    return ChunkedSource(documents, cache(lambda: Splitter(spec.resolve())))


def cut_selection(selection: Selection, column: str | None) -> Selection:
    """Return the selection of documents that are cut.

    Raises:
        ConfigError: the column is not one of the text, or a carried column has a chunk's name.
    """
    for name in selection.carried:
        if name in COLUMNS:
            raise ConfigError(
                f"the column {name!r} cannot be carried: chunks have a column of that name. Rename "
                "it in the source, or leave it out of columns."
            )
    return replace(selection, passage=column)


def _chunks(partition: Partition, splitter: Callable[[], Splitter]) -> Iterator[RowBatch]:
    """Yield the chunks of a partition's documents, in their order."""
    cutter = splitter()
    first_row = 0
    for batch in partition.read():
        documents = _documents(batch)
        left_out = (batch.skipped, batch.rejected)
        for start, stop in _groups(documents):
            try:
                chunks = cutter.split(documents[start:stop])
            except NoRoom as error:
                row = start + error.place
                raise _refused(partition.key, batch, row, first_row, error, cutter) from None
            yield _rows(batch, documents, start, chunks, *left_out)
            left_out = (0, ())
        first_row += len(batch) + batch.skipped + len(batch.rejected)


def _refused(
    key: str, batch: RowBatch, row: int, first_row: int, error: NoRoom, splitter: Splitter
) -> DataError:
    return DataError(
        key,
        f"the text without the part that is cut has {error.tokens:,} tokens, which leave a chunk "
        f"of {splitter.tokens:,} no room",
        "Shorten the other columns or the prompt, take some out of the template, or raise tokens "
        "of chunks.",
        int(batch.row_numbers(first_row)[row]),
        batch.place and batch.place(row),
    )


def _documents(batch: RowBatch) -> list[Document]:
    texts = batch.texts.to_pylist()
    if batch.passages is None:
        return [Document(text, 0, len(text)) for text in texts]
    passages = batch.passages.tolist()
    return [Document(text, *passage) for text, passage in zip(texts, passages, strict=True)]


def _groups(documents: Sequence[Document]) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents of about a megabyte; at least one, which may be empty."""
    start = 0
    characters = 0
    for place, document in enumerate(documents):
        characters += len(document.text)
        if characters >= _GROUP_CHARACTERS:
            yield start, place + 1
            start = place + 1
            characters = 0
    if start < len(documents) or not documents:
        yield start, len(documents)


def _rows(
    batch: RowBatch,
    documents: Sequence[Document],
    first: int,
    chunks: Sequence[Sequence[Chunk]],
    skipped: int,
    rejected: tuple[RejectedRow, ...],
) -> RowBatch:
    """Return the chunks of the documents from `first` on as rows."""
    rows = first + np.repeat(np.arange(len(chunks)), [len(own) for own in chunks])
    of_rows = pa.array(rows)
    ids = batch.ids.take(of_rows)
    texts, places = _chunk_columns(documents[first:], chunks)
    carried = {"document_id": ids, **places}
    if batch.carried is not None:
        taken = batch.carried.take(of_rows)
        carried |= dict(zip(taken.schema.names, taken.columns, strict=True))
    place = batch.place
    return RowBatch(
        _chunk_ids(ids, places["chunk"]),
        texts,
        skipped,
        pa.RecordBatch.from_pydict(carried),
        place and (lambda row: place(int(rows[row]))),
        source_rows=len(chunks),
        rejected=rejected,
        numbers=None if batch.numbers is None else batch.numbers[rows],
    )


def _chunk_columns(
    documents: Sequence[Document], chunks: Sequence[Sequence[Chunk]]
) -> tuple[pa.LargeStringArray, dict[str, pa.Array]]:
    """Return the texts of the chunks, and the columns of their numbers and places."""
    texts: list[str] = []
    numbers: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    for document, own in zip(documents, chunks, strict=False):
        for number, chunk in enumerate(own):
            texts.append(document.with_chunk(chunk))
            numbers.append(number)
            starts.append(chunk.start - document.start)
            ends.append(chunk.stop - document.start)
    places = {
        "chunk": pa.array(numbers, pa.int32()),
        "start": pa.array(starts, pa.int64()),
        "end": pa.array(ends, pa.int64()),
    }
    return pa.array(texts, pa.large_string()), places  # pyright: ignore[reportReturnType]


def _chunk_ids(ids: pa.Array, numbers: pa.Array) -> pa.Array:
    """Return `<id>#<number>`, binary if the ids are, otherwise strings."""
    kind = pa.binary() if ids.type == pa.binary() else pa.string()
    counted = numbers.cast(pa.string()).cast(kind)
    separator = pa.scalar("#", pa.string()).cast(kind)
    return pc.binary_join_element_wise(ids.cast(kind), counted, separator)  # pyright: ignore[reportAttributeAccessIssue]
