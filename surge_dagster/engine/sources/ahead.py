"""Files of a bucket that are opened before they are needed, so that requests overlap.

The first request of a small file brings its whole content. As long as files are read one after the
other, the next ones are opened concurrently.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pyarrow as pa

from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.listing import FIRST_BYTES
from surge_dagster.engine.support.waiting import in_background, result_of

AHEAD_BYTES = 4 * FIRST_BYTES  # of the first requests of all files that are opened ahead
_MOST_AHEAD = 16


class FilesAhead:
    """Opens the files of a source, which are mostly read in this order."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._places = {file.relative: place for place, file in enumerate(files)}
        self._opening: dict[int, Future[pa.NativeFile]] = {}
        self._last = -1
        self._lock = threading.Lock()

    def open(self, file: SourceFile) -> pa.NativeFile:
        """Open a file as `SourceFile.open` does."""
        place = self._places[file.relative]
        with self._lock:
            is_next = place == self._last + 1
            self._last = place
            opening = self._opening.pop(place, None)
            if is_next:
                self._open_following(place)
        if opening is None:
            return file.open()
        return result_of(opening)

    def _open_following(self, place: int) -> None:
        for passed in [each for each in self._opening if each < place]:
            del self._opening[passed]
        size = 0
        for number in range(place + 1, min(place + 1 + _MOST_AHEAD, len(self._files))):
            following = self._files[number]
            size += min(following.size, FIRST_BYTES)
            if size > AHEAD_BYTES:
                return
            if number not in self._opening and not following.refusal:
                self._opening[number] = in_background(following.open, "surge-source")
