"""Files of a bucket that are opened before they are needed, so that the time of a request does not
add up.

Of a small file the first request brings the whole content. As long as files are read one after the
other, more and more of the next ones are opened concurrently; a run that reads one here and there
opens one too many each time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pyarrow as pa

from surge_dagster.engine.sources.listing import FIRST_BYTES, SourceFile
from surge_dagster.engine.support.waiting import in_background, result_of

AHEAD_BYTES = 4 * FIRST_BYTES  # what the first requests of the files bring that are opened ahead
_MOST_AHEAD = 16


class FilesAhead:
    """Opens the files of a source, which are mostly read in this order."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._places = {file.relative: place for place, file in enumerate(files)}
        self._opening: dict[int, Future[pa.NativeFile]] = {}
        self._last = -1
        self._depth = 1
        self._lock = threading.Lock()

    def open(self, file: SourceFile) -> pa.NativeFile:
        """Open a file as `SourceFile.open` does."""
        place = self._places[file.relative]
        with self._lock:
            self._depth = min(2 * self._depth, _MOST_AHEAD) if place == self._last + 1 else 1
            self._last = place
            opening = self._opening.pop(place, None)
            self._opening = {each: opened for each, opened in self._opening.items() if each > place}
            held = 0
            for number, following in enumerate(
                self._files[place + 1 : place + 1 + self._depth], place + 1
            ):
                held += min(following.size, FIRST_BYTES)
                if held > AHEAD_BYTES:
                    break
                if number not in self._opening and not following.refusal:
                    self._opening[number] = in_background(following.open, "surge-source")
        return file.open() if opening is None else result_of(opening)
