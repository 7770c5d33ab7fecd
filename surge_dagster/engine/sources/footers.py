"""What a catalog's files and folders were when it was listed last, kept for as long as the process lives.

A process that looks at the same catalog again and again, as a sensor does, spends most of its time on footers that have
not changed. What is kept of one counts only while the file's size, its modification and status-change times, its inode
and its disk are those that were seen: a file written in place, replaced by a rename or given its old modification time
again differs in one of them. The one exception is a file that is written twice within the grain of its disk's clock, so
a file that has changed within the last two seconds is read again the next time.

Only listings use this. Whoever looks up a source version before a file is published reads the footer itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Footer:
    """What a listing wants to know from a file's footer.

    Attributes:
        version, key: as the file declares them, None where it does not.
        rows: of the file.
        row_bytes: of all columns, decoded.
    """

    version: str | None
    key: str | None
    rows: int
    row_bytes: int


_Stamp = tuple[int, int, int, int, int]
_known: dict[str, dict[str, tuple[_Stamp, Footer | list[str]]]] = {}  # by catalog, then by path


class KnownFooters:
    """The footers of one catalog, while it is listed once.

    Args:
        catalog: its folder; two listings of one folder share what they know.
    """

    def __init__(self, catalog: str) -> None:
        self._known = _known.setdefault(catalog, {})
        self._listed: set[str] = set()
        self._begun_ns = time.time_ns()
        self._status: os.stat_result | None = None

    def get(self, path: str, status: os.stat_result) -> Footer | None:
        """The footer of a file in this state, None when it has to be read."""
        self._listed.add(path)
        stamp, footer = self._known.get(path, (None, None))
        return footer if isinstance(footer, Footer) and stamp == _stamp(status) else None

    def keep(self, path: str, status: os.stat_result, footer: Footer) -> None:
        """Keep a footer that was read after the file was in this state."""
        self._keep(path, status, footer)

    def names(self, folder: str) -> list[str] | None:
        """The Parquet files of a folder, None when it has to be listed."""
        self._listed.add(folder)
        self._status = _look(folder)
        stamp, names = self._known.get(folder, (None, None))
        is_same = self._status is not None and stamp == _stamp(self._status)
        return names if is_same and isinstance(names, list) else None

    def keep_names(self, folder: str, names: list[str]) -> None:
        """Keep the names in a folder without folders, which were listed after `names` was asked for them."""
        if self._status is not None:
            self._keep(folder, self._status, names)

    def _keep(self, path: str, status: os.stat_result, known: Footer | list[str]) -> None:
        if self._begun_ns - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            self._known[path] = (_stamp(status), known)

    def forget_others(self) -> None:
        """Forget files that were not asked for since this was made, so that no more is kept than the catalog has."""
        for path in self._known.keys() - self._listed:
            self._known.pop(path, None)


def _look(folder: str) -> os.stat_result | None:
    try:
        return os.stat(folder)  # noqa: PTH116, a Path for each folder costs more than looking at it
    except OSError:
        return None


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
