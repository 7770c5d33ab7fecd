"""What a catalog's files and folders were when it was listed last, kept for as long as the process lives.

A process that looks at the same catalog again and again, as a sensor does, spends most of its time on footers that have
not changed. What is kept of one counts only while the file's size, its modification and status-change times, its inode
and its disk are those that were seen: a file written in place, replaced by a rename or given its old modification time
again differs in one of them. The one exception is a file that is written twice within the grain of its disk's clock, so
a file that has changed within the last two seconds is read again the next time. A partition whose folder and files are
all as they were is given as it was, without being put together again.

Only listings use this. Whoever looks up a source version before a file is published reads the footer itself.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from surge_dagster.engine.sources.partition import Partition

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
_Stamps = tuple[_Stamp, ...]
_stamp: Callable[[os.stat_result], _Stamp] = operator.attrgetter(
    "st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev"
)
_known: dict[str, dict[str, tuple[_Stamp, Footer | list[str]]]] = {}  # by catalog, then by path
# By catalog and how it is read, then by folder: its own path and those of its files, how they were, and what they made.
_made: dict[Hashable, dict[str, tuple[tuple[str, ...], _Stamps, Partition]]] = {}


class KnownFooters:
    """The footers of one catalog, while it is listed once.

    Args:
        catalog: its folder; two listings of one folder share what they know.
        reading: everything else that a partition depends on; partitions are shared by listings that agree in it.
    """

    def __init__(self, catalog: str, reading: Hashable) -> None:
        self._known = _known.setdefault(catalog, {})
        self._made = _made.setdefault((catalog, reading), {})
        self._listed: set[str] = set()
        self._seen: dict[str, _Stamp] = {}  # how it was when what is kept of it was found to be true
        self._begun_ns = time.time_ns()
        self._status: os.stat_result | None = None
        self._has_folder_times = not _filesystem_of(catalog).startswith("fuse")

    def get(self, path: str, status: os.stat_result) -> Footer | None:
        """The footer of a file in this state, None when it has to be read."""
        self._listed.add(path)
        now = _stamp(status)
        stamp, footer = self._known.get(path, (None, None))
        if not isinstance(footer, Footer) or stamp != now:
            return None
        self._seen[path] = now
        return footer

    def keep(self, path: str, status: os.stat_result, footer: Footer) -> None:
        """Keep a footer that was read after the file was in this state."""
        self._keep(path, status, footer)

    def names(self, folder: str) -> list[str] | None:
        """The names in a folder that were kept, None when it has to be listed."""
        self._listed.add(folder)
        self._status = _look(folder) if self._has_folder_times else None
        now = _stamp(self._status) if self._status is not None else None
        stamp, names = self._known.get(folder, (None, None))
        if now is None or not isinstance(names, list) or stamp != now:
            return None
        self._seen[folder] = now
        return names

    def keep_names(self, folder: str, names: list[str]) -> None:
        """Keep the names in a folder, which were listed after `names` was asked for them.

        Of a folder with folders that would be asked too, nothing may be kept: its state says nothing of theirs.
        """
        if self._status is not None:
            self._keep(folder, self._status, names)

    def unchanged(self, root: str, folders: Iterable[str]) -> dict[str, Partition]:
        """The partitions of those folders that are, with all their files, as they were when these were made."""
        found: dict[str, Partition] = {}
        listed: list[tuple[str, ...]] = []
        for folder in folders:
            kept = self._made.get(f"{root}/{folder}")
            if kept is None:
                continue
            paths, stamps, partition = kept
            try:
                now = tuple(map(_stamp, map(os.stat, paths)))
            except OSError:
                continue
            if now == stamps:
                found[folder] = partition
                listed.append(paths)
        self._listed.update(*listed)
        return found

    def keep_partition(self, folder: str, files: Sequence[str], partition: Partition) -> None:
        """Keep what was made of a folder and these files, if this listing found all of them settled."""
        paths = (folder, *files)
        stamps = tuple(self._seen[path] for path in paths if path in self._seen)
        if len(stamps) == len(paths):
            self._made[folder] = (paths, stamps, partition)

    def _keep(self, path: str, status: os.stat_result, known: Footer | list[str]) -> None:
        if self._begun_ns - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            self._seen[path] = stamp = _stamp(status)
            self._known[path] = (stamp, known)

    def forget_others(self) -> None:
        """Forget files that were not asked for since this was made, so that no more is kept than the catalog has."""
        for path in self._known.keys() - self._listed:
            self._known.pop(path, None)
        for folder in self._made.keys() - self._listed:
            self._made.pop(folder, None)


def _filesystem_of(folder: str) -> str:
    """The type of filesystem that a folder lies on; empty where that cannot be told.

    Drivers in user space, which mount buckets, need not give a folder another time when something in it changes.
    """
    place, found = f"{os.path.realpath(folder)}/", (0, "")
    try:
        with open("/proc/self/mounts") as mounts:  # noqa: PTH123
            for _, point, kind, *_ in map(str.split, mounts):
                root = point.replace("\\040", " ").rstrip("/") + "/"
                if place.startswith(root) and len(root) >= found[0]:
                    found = (len(root), kind)
    except (OSError, ValueError):
        return ""
    return found[1]


def _look(folder: str) -> os.stat_result | None:
    try:
        return os.stat(folder)  # noqa: PTH116, a Path for each folder costs more than looking at it
    except OSError:
        return None
