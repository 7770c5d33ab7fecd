"""Templates of small output files, proven: what is left for each file is to fill the gaps.

A template has two parts, what stands before the vectors and what stands behind them, and knows nothing of Parquet. It
is cut from a file of made-up rows that `write_file` wrote, at the numbers, pages and facts in which files of one form
(columns, types, number of rows) differ: each is looked for where its turn is, behind the mark of its field. Then files
of other made-up rows are put together by it: short ones and long ones, and some whose checksums are a byte shorter,
which alone moves everything where all files of a form are of one size. Unless they are equal to those of `write_file`,
byte by byte, that one writes the files of the form. So another way of writing costs time, no more.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.embedding_file import LEAST_COMPRESSED_BYTES, FileFacts, FileRows
from surge_dagster.engine.files.fact_values import SharedValues, shared_facts, values_of
from surge_dagster.engine.files.parquet_columns import plain_values
from surge_dagster.engine.files.parquet_encoding import MAGIC, checksum_number, number, varint, with_length
from surge_dagster.engine.files.small_file import write_file
from surge_dagster.engine.store.store import StoredObject

log = logging.getLogger(__name__)

_TRAILER_BYTES = 8
_LONGEST_HEADER = 64
_INT64 = pa.int64()
_TRIES = 1_000
_LONGEST_CHECKSUM = 5
# Marks of fields in Thrift's compact protocol: how far its number is from that of the field before, and its type.
_NEXT_INT32, _NEXT_INT64, _SECOND_NEXT_INT64, _NEXT_BYTES = b"\x15", b"\x16", b"\x26", b"\x18"
_STRING_SIZES = b"\x3c\x16"


@dataclass(frozen=True, slots=True)
class Form:
    """What files have in common that one template makes."""

    id_type: pa.DataType
    dimension: int
    dtype: np.dtype
    include_text: bool
    rows: int


@dataclass(frozen=True, slots=True)
class _Column:
    """What a column has in common in the files of a form.

    Attributes:
        fixed_bytes: of its page header, without what stands in gaps, and of the vectors' levels.
        length_bytes: what the lengths of its strings take; None where it has no strings.
    """

    fixed_bytes: int
    length_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Template:
    """The files of a form, with a gap `%b` for each thing in which they differ.

    Attributes:
        head: up to the vectors; for its gaps see `_gaps`.
        foot: the pieces of what stands behind them. After the gaps of `_gaps` come the values of the facts, each behind
            its length.
        levels_checksum: of what stands before the vectors in their page, from which that of the page goes on.
        series: those that were made so far, by what their files share.
    """

    head: bytes
    foot: tuple[bytes, ...]
    columns: tuple[_Column, ...]
    levels_checksum: int
    series: dict[Hashable, Series] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series:
    """Files of a form that also share what `SharedValues` says.

    Attributes:
        foot: what stands behind the vectors. After the gaps of `_gaps` come the values that files have of their own.
    """

    template: _Template
    shared: SharedValues
    foot: bytes

    @classmethod
    def of(cls, template: _Template, facts: FileFacts) -> Series:
        """The series that a file with these facts belongs to."""
        shared = SharedValues(facts)
        filled = [None if value is None else with_length(value) for value in shared.values]
        numbers = len(template.foot) - 1 - len(filled)
        pieces = [template.foot[0]]
        for gap, piece in zip([*[None] * numbers, *filled], template.foot[1:], strict=True):
            if gap is None:
                pieces.append(piece)
            else:
                pieces[-1] += gap + piece
        return cls(template, shared, _joined(pieces))

    def file(self, pages: Sequence[bytes], vectors: memoryview, facts: FileFacts) -> bytes:
        """A whole file.

        Args:
            pages: of the columns before the vectors.
            facts: which share what the series shares.
        """
        template = self.template
        head, foot = _gaps(template.columns, pages, zlib.crc32(vectors, template.levels_checksum), len(vectors))
        foot += [varint(len(value)) + value for value in self.shared.own(facts)]
        footer = self.foot % tuple(foot)
        return b"".join((template.head % tuple(head), vectors, footer, len(footer).to_bytes(4, "little"), MAGIC))


_templates: dict[Form, _Template | None] = {}
_lock = threading.Lock()


def series_of(form: Form, facts: FileFacts) -> Series | None:
    """The series that a file of a form with these facts belongs to; None where the form is not one that is known."""
    template = _template(form)
    if template is None:
        return None
    shared = shared_facts(facts)
    if shared not in template.series:
        template.series[shared] = Series.of(template, facts)
    return template.series[shared]


def _gaps(
    columns: Sequence[_Column], pages: Sequence[bytes], checksum: int, vector_bytes: int
) -> tuple[list[bytes], list[bytes]]:
    """What differs in the files of a form, except for the facts.

    Args:
        pages: of the columns before the vectors.
        checksum: of the vectors' page.

    Returns:
        Before the vectors, of each column but the last: its page's size, twice, its checksum, and the page; then the
        checksum of the vectors' page. In the footer, of each column: its size, twice, its place, unless it is the
        first one, and the bytes of its strings; then the size of all, twice.
    """
    head: list[bytes] = []
    foot: list[bytes] = []
    place = len(MAGIC)
    for column, page in zip(columns, pages, strict=False):
        length = len(page)
        size, sum_of_page = number(length), checksum_number(zlib.crc32(page))
        head += (size, size, sum_of_page, page)
        chunk = column.fixed_bytes + 2 * len(size) + len(sum_of_page) + length
        described = number(chunk)
        foot += (described, described)
        if place > len(MAGIC):
            foot.append(number(place))
        if column.length_bytes is not None:
            foot.append(number(length - column.length_bytes))
        place += chunk
    head.append(checksum_number(checksum))
    chunk = columns[-1].fixed_bytes + len(head[-1]) + vector_bytes
    described, whole = number(chunk), number(place + chunk - len(MAGIC))
    foot += (described, described, number(place), whole, whole)
    return head, foot


def _template(form: Form) -> _Template | None:
    try:
        return _templates[form]
    except KeyError:
        pass
    with _lock:
        if form not in _templates:
            _templates[form] = _proven_or_none(form)
        return _templates[form]


def _proven_or_none(form: Form) -> _Template | None:
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


def _proven(form: Form) -> _Template | None:
    """The template of a form, if files of other rows than it was cut from come out as `write_file` writes them."""
    sample = _sample(form, 200, 2)
    template = _cut_from(_written(sample), form, sample)
    if template is None:
        return None
    longest = LEAST_COMPRESSED_BYTES // 2 - 16 * form.rows
    others = _sample(form, 0, 1), _sample(form, longest, 300), _with_short_checksums(form, template)
    is_right = all(_put_together(template, rows) == _written(rows) for rows in (sample, *others))
    return template if is_right else None


_Sample = tuple[pa.Array, "pa.Array | None", np.ndarray, FileFacts]


def _sample(form: Form, longest: int, key_bytes: int, first: int = 0) -> _Sample:
    """Rows of a form, made up.

    Args:
        longest: bytes of the first id and of the first text; 0 makes all texts empty.
        key_bytes: of the partition's key.
        first: number of the first row; others make other ids, texts and vectors.
    """
    numbers = range(first, first + form.rows)
    names = [f"id {number}" for number in numbers]
    names[0] = names[0].ljust(longest, "+")
    ids = pa.array(numbers if form.id_type == _INT64 else names, form.id_type)
    texts = [f"text {number}" if longest else "" for number in numbers]
    texts[0] = texts[0].ljust(longest, "-")
    matrix = np.linspace(-1 - first, longest, form.rows * form.dimension).reshape(form.rows, -1).astype(form.dtype)
    facts = FileFacts(
        *("k" * key_bytes, "space", "model", "fp32", "version", "content", "desired"),
        *(form.rows, form.dimension, form.rows // 2),
    )
    return ids, pa.array(texts, pa.large_string()) if form.include_text else None, matrix, facts


def _with_short_checksums(form: Form, template: _Template) -> _Sample:
    """Rows of which each page's checksum takes a byte less than it usually does, as one in sixteen does."""
    found: list[Any] = [None, None, None]
    for first in range(_TRIES):
        ids, texts, matrix, facts = _sample(form, 100, 9, first)
        vectors = zlib.crc32(matrix.tobytes(), template.levels_checksum)
        checksums = [0 if column is None else zlib.crc32(plain_values(column)) for column in (ids, texts)]
        for place, (part, checksum) in enumerate(zip((ids, texts, matrix), (*checksums, vectors), strict=True)):
            if found[place] is None and len(checksum_number(checksum)) < _LONGEST_CHECKSUM:
                found[place] = part
        if all(part is not None for part in (found[0], found[2], found[1] if form.include_text else matrix)):
            return found[0], found[1], found[2], facts
    raise ValueError(f"no rows with short checksums were found in {_TRIES} tries")


def _put_together(template: _Template, sample: _Sample) -> bytes:
    ids, texts, matrix, facts = sample
    pages = [plain_values(column).to_pybytes() for column in (ids, texts) if column is not None]
    return Series.of(template, facts).file(pages, matrix.data.cast("B"), facts)


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
    write_file(kept, FileRows([ids], ids.type, texts, matrix), facts)
    return kept.sink.getvalue().to_pybytes()


def _cut_from(file: bytes, form: Form, sample: _Sample) -> _Template | None:
    """The template of a form from one of its files, None when that is not built as it is thought to be."""
    ids, texts, matrix, facts = sample
    footer_at = len(file) - _TRAILER_BYTES - int.from_bytes(file[-_TRAILER_BYTES : -len(MAGIC)], "little")
    head, footer = file[: footer_at - matrix.nbytes], file[footer_at:-_TRAILER_BYTES]
    levels = _levels(head, matrix)
    if levels is None:
        return None
    pages = [plain_values(column).to_pybytes() for column in (ids, texts) if column is not None]
    differing = pages, zlib.crc32(levels + matrix.tobytes()), matrix.nbytes
    lengths = [None if form.id_type == _INT64 else 4 * form.rows, *[4 * form.rows] * (len(pages) - 1), None]
    gaps, _ = _gaps([_Column(0, None) for _ in lengths], *differing)  # of which these do not depend on the columns
    pieces = _cut(head, gaps, [*[*[_NEXT_INT32] * 3, b""] * len(pages), _NEXT_INT32])
    if pieces is None:
        return None
    # A header lies between two pages: three pieces and what follows the checksum.
    fixed = [sum(map(len, pieces[4 * index : 4 * index + 4])) for index in range(len(pages))]
    fixed[0] -= len(MAGIC)
    fixed.append(len(pieces[-2]) + len(pieces[-1]))
    columns = tuple(map(_Column, fixed, lengths))
    _, numbers = _gaps(columns, *differing)
    values = [with_length(value) for value in values_of(facts)]
    foot = _cut(footer, [*numbers, *values], [*_footer_marks(columns), *[_NEXT_BYTES] * len(values)])
    return None if foot is None else _Template(_joined(pieces), tuple(foot), columns, zlib.crc32(levels))


def _levels(head: bytes, matrix: np.ndarray) -> bytes | None:
    """What stands between the header of the vectors' page and the vectors: with it, size and checksum are right."""
    for length in range(len(head)):
        levels, header = head[len(head) - length :], head[-length - _LONGEST_HEADER : len(head) - length]
        has_size = header.count(number(length + matrix.nbytes)) > 1
        if has_size and checksum_number(zlib.crc32(levels + matrix.tobytes())) in header:
            return levels
    return None


def _footer_marks(columns: Sequence[_Column]) -> list[bytes]:
    """What stands before each number of a footer, in the order of `_gaps`."""
    marks: list[bytes] = []
    for index, column in enumerate(columns):
        marks += (_NEXT_INT64, _NEXT_INT64)
        if index:
            marks.append(_SECOND_NEXT_INT64)
        if column.length_bytes is not None:
            marks.append(_STRING_SIZES)
    return [*marks, _NEXT_INT64, _NEXT_INT64]


def _cut(data: bytes, gaps: Sequence[bytes], marks: Sequence[bytes]) -> list[bytes] | None:
    """What is left of `data` around the gaps; they are looked for from its end, where less can be taken for them.

    Args:
        marks: what stands before each gap: a number may be a single byte, which stands in many places.
    """
    pieces: list[bytes] = []
    end = len(data)
    for gap, mark in zip(reversed(gaps), reversed(marks), strict=True):
        at = data.rfind(mark + gap, 0, end)
        if at < 0:
            return None
        at += len(mark)
        pieces.append(data[at + len(gap) : end])
        end = at
    return [*pieces, data[:end]][::-1]


def _joined(pieces: list[bytes]) -> bytes:
    return b"%b".join(piece.replace(b"%", b"%%") for piece in pieces)
