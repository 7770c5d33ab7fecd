"""An Arrow file that gives out nothing before it was compared with its checksums.

Pyarrow reads through it as through any file: whatever range it asks for, the parts that the range touches are compared
first, so that its readers and datasets are as safe as the file format is not. A file on a local disk can be mapped
instead of read: then each part is compared once, and what is given out is the file's own memory.
"""

from __future__ import annotations

import io
import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from surge_dagster.engine.files.arrow_footer import ArrowEnd, Part, end_bytes, read_end

# Linux gives a process 65,530 maps by default.
_LEAST_MAPPED_BYTES = 64 * 1024

_END_BYTES = 8 * 1024


def end_of(source: pa.NativeFile) -> ArrowEnd:
    """The end of an open file, from one read of its last bytes where they are enough.

    Raises:
        InvalidFile: it is not a complete embedding file.
        OSError: it cannot be read.
    """
    size = source.size()
    end = _read(source, max(0, size - _END_BYTES), min(size, _END_BYTES))
    needed = end_bytes(end, size)
    if needed > len(end):
        end = _read(source, size - needed, needed)
    return read_end(end[-needed:], size)


class CheckedFile(io.RawIOBase):
    """Reads a file that `end` belongs to, from one thread at a time, as pyarrow's files do.

    Args:
        source: the file; it is closed with this.
        mapped: map the file where it lies on a local disk.

    Raises:
        OSError: while reading: a part does not match its checksum, or cannot be read.
    """

    def __init__(self, source: pa.NativeFile, end: ArrowEnd, *, mapped: bool = False) -> None:
        super().__init__()
        self._source = source
        self._parts: Sequence[Part] = end.parts
        self._end = end.content
        self._borders = [0, *accumulate(part.length for part in end.parts)]
        self._position = 0
        self._held: tuple[int, pa.Buffer | None] = (0, None)  # where what was compared last begins
        self._map = _map_of(source) if mapped else None
        self._compared: set[int] = set()  # parts of the mapped file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size()}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._borders[-1] + len(self._end)

    def read(self, size: int | None = -1, /) -> Any:
        """Bytes, or a view of the file's memory or of what was read of it."""
        start, left = self._position, max(0, self.size() - self._position)
        stop = start + (left if size is None or size < 0 else min(size, left))
        self._position = stop
        border = self._borders[-1]
        if start >= border or start == stop:
            return self._end[start - border : stop - border] if stop > border else b""
        if stop <= border:
            return self._checked(start, stop)
        return b"".join((memoryview(self._checked(start, border)), self._end[: stop - border]))

    def readinto(self, buffer: Any, /) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = memoryview(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def _checked(self, start: int, stop: int) -> pa.Buffer:
        begin, held = self._held
        if held is None or not begin <= start <= stop <= begin + len(held):
            first, last = bisect_right(self._borders, start) - 1, bisect_right(self._borders, stop - 1) - 1
            begin, end = self._borders[first], self._borders[last + 1]
            if self._map is not None:
                held = self._map.slice(begin, end - begin)
            else:
                held = pa.py_buffer(_read(self._source, begin, end - begin))
            for number in range(first, last + 1):
                if number not in self._compared:
                    self._compare(number, held, begin)
            self._held = begin, held
        return held.slice(start - begin, stop - start)

    def _compare(self, number: int, held: pa.Buffer, begin: int) -> None:
        part = self._parts[number]
        if zlib.crc32(held.slice(self._borders[number] - begin, part.length)) != part.checksum:
            what = f"record batch {(number - 1) // 2}" if number else "its beginning"
            raise OSError(f"checksum verification failed: {what} was changed after it was written")
        if self._map is not None:
            self._compared.add(number)


def _map_of(source: pa.NativeFile) -> pa.Buffer | None:
    if not isinstance(source, pa.OSFile):
        return None
    descriptor = source.fileno()
    if os.fstat(descriptor).st_size < _LEAST_MAPPED_BYTES:
        return None
    # Python's own maps keep a descriptor open for as long as they live, and a catalog has thousands of files.
    with pa.memory_map(f"/proc/self/fd/{descriptor}") as mapped:
        return mapped.read_buffer()


def _read(source: pa.NativeFile, start: int, length: int) -> Any:
    """Bytes, all of them.

    Raises:
        OSError: the file has become shorter.
    """
    source.seek(start)
    content = source.read(length)
    if len(content) != length:
        raise OSError(f"{len(content):,} bytes came of {length:,}")
    return content
