"""Output files of many tiny partitions at once: the same bytes that `write_file` writes, in about half of its time.

Where partitions have ten rows, a run is as fast as its Python is, so what can be done once for a group of neighbours is
done once: their strings become Parquet's pages in one go, and what is left for each is to fill the gaps of two
templates, of what stands before the vectors and of what stands behind them.

A template knows nothing of Parquet. It is cut from a file of made-up rows that `write_file` wrote, at the numbers,
pages and facts in which files of one form (columns, types, number of rows) differ: each is looked for where its turn
is. Then files of other made-up rows, short ones and long ones, are put together by it. Unless they are equal to those
of `write_file`, byte by byte, that one writes the files of the form. So another way of writing costs time, no more.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from surge_dagster.engine.columns import value_bytes, value_offsets
from surge_dagster.engine.output.embedding_file import LEAST_COMPRESSED_BYTES, FileFacts
from surge_dagster.engine.output.fact_values import values_of
from surge_dagster.engine.output.parquet_encoding import MAGIC, checksum_number, number, with_length
from surge_dagster.engine.output.small_file import MAX_ROWS, MAX_VECTOR_BYTES, write_file
from surge_dagster.engine.output.store import StoredObject

log = logging.getLogger(__name__)

_TRAILER_BYTES = 8
_LONGEST_HEADER = 64


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of neighbouring partitions, and where each of them begins.

    Attributes:
        ids: string, int64 or binary.
        texts: None where files have no texts.
        matrix: [rows, dimension], contiguous.
        bounds: the first row of each partition, and the end of the last one.
    """

    ids: pa.Array
    texts: pa.Array | None
    matrix: np.ndarray
    bounds: list[int]


@dataclass(frozen=True, slots=True)
class _Form:
    """What files have in common that one template makes."""

    id_type: pa.DataType
    dimension: int
    dtype: np.dtype
    include_text: bool
    rows: int


@dataclass(frozen=True, slots=True)
class _Template:
    """The files of a form, with a gap `%b` for each thing in which they differ.

    Attributes:
        head: up to the vectors. Gaps: of each column before them its page's size, twice, its checksum, and the page;
            then the checksum of the vectors' page.
        foot: behind the vectors. Gaps: `_places`, then the values of the facts, each behind its length.
        header_bytes: of each column's page header, without what stands in gaps.
        levels: what stands before the vectors in their page.
        levels_checksum: its checksum, from which that of the page goes on.
    """

    head: bytes
    foot: bytes
    header_bytes: tuple[int, ...]
    levels: bytes
    levels_checksum: int


_templates: dict[_Form, _Template | None] = {}
_lock = threading.Lock()


def fits(rows: int, dimension: int, itemsize: int, string_bytes: int) -> bool:
    """Whether a partition is one of those that are written in groups.

    Args:
        string_bytes: of its ids and texts, or more.
    """
    is_small = rows * dimension * itemsize <= MAX_VECTOR_BYTES and string_bytes < LEAST_COMPRESSED_BYTES
    return is_small and 0 < rows <= MAX_ROWS


def group_files(rows: GroupRows, facts: Sequence[FileFacts]) -> Iterator[bytes | None]:
    """The files of partitions that `fits`, equal to those that `write_file` writes, each when it is asked for.

    Args:
        facts: of each partition.

    Yields:
        None for a file whose form is not one that is known here.
    """
    columns = [column for column in (rows.ids, rows.texts) if column is not None]
    pages = [_pages(column, rows.bounds) for column in columns]
    matrix = rows.matrix
    vectors, row_bytes = matrix.data.cast("B"), matrix.shape[1] * matrix.itemsize
    forms: dict[int, tuple[_Form, _Template | None]] = {}
    for place, said in enumerate(facts):
        first, end = rows.bounds[place], rows.bounds[place + 1]
        if end - first not in forms:
            form = _Form(rows.ids.type, matrix.shape[1], matrix.dtype, rows.texts is not None, end - first)
            forms[end - first] = form, _template(form)
        form, template = forms[end - first]
        if template is None:
            yield None
        else:
            own = [column[place] for column in pages]
            yield _filled(template, form, own, vectors[first * row_bytes : end * row_bytes], said)


def _pages(column: pa.Array, bounds: list[int]) -> list[bytes]:
    """The values of each partition in Parquet's encoding PLAIN: as they are, or each string behind its length."""
    if pa.types.is_int64(column.type):
        raw, ends = column.to_numpy(zero_copy_only=True).tobytes(), [8 * bound for bound in bounds]
    else:
        offsets = value_offsets(column)
        starts = offsets - offsets[0] + 4 * np.arange(len(offsets))  # of the strings, each behind the lengths before it
        places = starts[:-1, np.newaxis] + np.arange(4)
        page = np.empty(int(starts[-1]), np.uint8)
        is_length = np.zeros(len(page), bool)
        is_length[places] = True
        page[places] = np.diff(offsets).astype("<u4").view(np.uint8).reshape(-1, 4)
        page[~is_length] = np.frombuffer(value_bytes(column, offsets), np.uint8)
        raw, ends = page.tobytes(), starts[bounds].tolist()
    return [raw[ends[place] : ends[place + 1]] for place in range(len(bounds) - 1)]


def _filled(template: _Template, form: _Form, pages: list[bytes], vectors: memoryview, facts: FileFacts) -> bytes:
    """The whole file."""
    gaps: list[bytes] = []
    sizes: list[int] = []
    for page, header in zip(pages, template.header_bytes, strict=False):
        size, checksum = number(len(page)), checksum_number(zlib.crc32(page))
        gaps += (size, size, checksum, page)
        sizes.append(header + 2 * len(size) + len(checksum) + len(page))
    checksum = checksum_number(zlib.crc32(vectors, template.levels_checksum))
    gaps.append(checksum)
    sizes.append(template.header_bytes[-1] + len(checksum) + len(template.levels) + len(vectors))
    places = _places(form, pages, sizes)
    footer = template.foot % (*map(number, places), *map(with_length, values_of(facts)))
    return b"".join((template.head % tuple(gaps), vectors, footer, len(footer).to_bytes(4, "little"), MAGIC))


def _places(form: _Form, pages: list[bytes], sizes: list[int]) -> list[int]:
    """The numbers in a footer: of each column its size, twice, its place, and the bytes of its strings; of all, twice.

    The first column's place is the same in all files.
    """
    numbers: list[int] = []
    place = len(MAGIC)
    for index, size in enumerate(sizes):
        numbers += (size, size)
        if index:
            numbers.append(place)
        if index < len(pages) and (index or form.id_type != _INT64):
            numbers.append(len(pages[index]) - 4 * form.rows)
        place += size
    return [*numbers, place - len(MAGIC), place - len(MAGIC)]


def _template(form: _Form) -> _Template | None:
    try:
        return _templates[form]
    except KeyError:
        pass
    with _lock:
        if form not in _templates:
            _templates[form] = _proven_or_none(form)
        return _templates[form]


def _proven_or_none(form: _Form) -> _Template | None:
    try:
        template = _proven(form)
    except Exception:  # files in another form than the one known here cost time and nothing else
        log.debug("a file could not be taken apart", exc_info=True)
        template = None
    if template is None:
        log.warning(
            "files of %d rows are written one by one, which takes longer: their form is not the one known here",
            form.rows,
        )
    return template


def _proven(form: _Form) -> _Template | None:
    """The template of a form, if files of other rows than it was cut from come out as `write_file` writes them."""
    sample = _sample(form, 200, 2)
    template = _cut_from(_written(sample), form, sample)
    if template is not None and all(
        _put_together(template, form, rows) == _written(rows)
        for rows in (sample, _sample(form, 0, 1), _sample(form, LEAST_COMPRESSED_BYTES // 2 - 16 * form.rows, 300))
    ):
        return template
    return None


_Sample = tuple[pa.Array, "pa.Array | None", np.ndarray, FileFacts]


def _sample(form: _Form, longest: int, key_bytes: int) -> _Sample:
    """Rows of a form, made up.

    Args:
        longest: bytes of the first id and of the first text; 0 makes all texts empty.
        key_bytes: of the partition's key.
    """
    names = [f"id {row}" for row in range(form.rows)]
    names[0] = names[0].ljust(longest, "+")
    ids = pa.array(range(form.rows) if form.id_type == _INT64 else names, form.id_type)
    texts = [f"text {row}".ljust(longest if row == 0 else 0, "-") if longest else "" for row in range(form.rows)]
    matrix = np.linspace(-1, longest, form.rows * form.dimension).reshape(form.rows, -1).astype(form.dtype)
    facts = FileFacts(
        *("k" * key_bytes, "space", "model", "fp32", "version", "content", "desired"),
        *(form.rows, form.dimension, form.rows // 2),
    )
    return ids, pa.array(texts, pa.large_string()) if form.include_text else None, matrix, facts


def _put_together(template: _Template, form: _Form, sample: _Sample) -> bytes:
    ids, texts, matrix, facts = sample
    pages = [_pages(column, [0, form.rows])[0] for column in (ids, texts) if column is not None]
    return _filled(template, form, pages, matrix.data.cast("B"), facts)


class _Kept:
    """An upload to nowhere."""

    def __init__(self) -> None:
        self.sink = pa.BufferOutputStream()

    def write(self, data: bytes) -> None:
        self.sink.write(data)

    def publish(self, still_wanted: object) -> StoredObject:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _written(sample: _Sample) -> bytes:
    ids, texts, matrix, facts = sample
    kept = _Kept()
    write_file(kept, [ids], ids.type, texts, matrix, facts)
    return kept.sink.getvalue().to_pybytes()


def _cut_from(file: bytes, form: _Form, sample: _Sample) -> _Template | None:
    """The template of a form from one of its files, None when that is not built as it is thought to be."""
    ids, texts, matrix, facts = sample
    footer_at = len(file) - _TRAILER_BYTES - int.from_bytes(file[-_TRAILER_BYTES : -len(MAGIC)], "little")
    head, footer = file[: footer_at - matrix.nbytes], file[footer_at:-_TRAILER_BYTES]
    levels = _levels(head, matrix)
    if levels is None:
        return None
    pages = [_pages(column, [0, form.rows])[0] for column in (ids, texts) if column is not None]
    gaps: list[bytes] = []
    for page in pages:
        size = number(len(page))
        gaps += (size, size, checksum_number(zlib.crc32(page)), page)
    gaps.append(checksum_number(zlib.crc32(levels + matrix.tobytes())))
    pieces = _cut(head, gaps)
    if pieces is None:
        return None
    # A header lies between two pages: three pieces and what follows the checksum.
    header_bytes = [sum(map(len, pieces[4 * index : 4 * index + 4])) for index in range(len(pages))]
    header_bytes[0] -= len(MAGIC)
    header_bytes.append(len(pieces[-2]) + len(pieces[-1]) - len(levels))
    sizes = [
        header + 2 * len(gaps[4 * index]) + len(gaps[4 * index + 2]) + len(page)
        for index, (header, page) in enumerate(zip(header_bytes, pages, strict=False))
    ]
    sizes.append(header_bytes[-1] + len(gaps[-1]) + len(levels) + matrix.nbytes)
    numbers = _places(form, pages, sizes)
    foot = _cut(footer, [*map(number, numbers), *map(with_length, values_of(facts))])
    if foot is None:
        return None
    return _Template(_joined(pieces), _joined(foot), tuple(header_bytes), levels, zlib.crc32(levels))


def _levels(head: bytes, matrix: np.ndarray) -> bytes | None:
    """What stands between the header of the vectors' page and the vectors: with it, size and checksum are right."""
    for length in range(len(head)):
        levels, header = head[len(head) - length :], head[-length - _LONGEST_HEADER : len(head) - length]
        has_size = header.count(number(length + matrix.nbytes)) > 1
        if has_size and checksum_number(zlib.crc32(levels + matrix.tobytes())) in header:
            return levels
    return None


def _cut(data: bytes, gaps: Sequence[bytes]) -> list[bytes] | None:
    """What is left of `data` around the gaps; they are looked for from its end, where less can be taken for them."""
    pieces: list[bytes] = []
    end = len(data)
    for gap in reversed(gaps):
        at = data.rfind(gap, 0, end)
        if at < 0:
            return None
        pieces.append(data[at + len(gap) : end])
        end = at
    return [*pieces, data[:end]][::-1]


def _joined(pieces: list[bytes]) -> bytes:
    return b"%b".join(piece.replace(b"%", b"%%") for piece in pieces)


_INT64 = pa.int64()
