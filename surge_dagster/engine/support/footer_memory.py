"""What was read at the ends of files, remembered so that each version of a file is read once.

The process remembers it for the places that were looked at of late. For a bucket it is also kept in a file of the
project's cache folder, one per place, which can be deleted at any time: what it does not have is read again. gzip's
checksum finds a damaged file. The file is replaced as a whole: of two processes the last one wins, and what the other
one has read is read again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from surge_dagster.engine.support import disk_cache

Tag = tuple[int, str]  # of a version of a file, as a listing shows it: its size, and what changes with its content
T = TypeVar("T")

_FORMAT = "surge footers 6"
_MOST_PLACES = 256

_places: dict[str, dict[str, tuple[Tag, Any]]] = {}  # tag and footer by name; the place looked at last is the last
_lock = threading.Lock()


class FooterMemory(Generic[T]):
    """The remembered footers of one place; an entry counts only for the name and the tag that it was read under.

    Args:
        identity: distinguishes the place from every other one; only a digest of it is written.
        pack: a footer as JSON has it; None where it is not kept on the disk.
        unpack: the footer of a name and a tag from that; raises ValueError or TypeError where it is damaged.
    """

    def __init__(
        self,
        identity: str,
        *,
        on_disk: bool,
        pack: Callable[[T], list[Any] | None],
        unpack: Callable[[str, Tag, list[Any]], T],
    ) -> None:
        self._place = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._file = f"footers/{self._place}"
        self._on_disk = on_disk
        self._pack, self._unpack = pack, unpack
        self._rows: dict[str, list[Any]] = {}  # of the disk, while it is loaded: tag and packed footer by name
        self._new: dict[str, list[Any]] = {}  # what was read and is not on the disk yet, likewise

    def known(self, tags: Mapping[str, Tag]) -> dict[str, T]:
        """What is known of these versions of files; a file that is not among them has to be read."""
        entries, footers = self._entries(), dict[str, T]()
        for name, tag in tags.items():
            entry = entries.get(name)
            if entry is not None and entry[0] == tag:
                footers[name] = entry[1]
            elif (row := self._rows.get(name)) is not None and row[0] == list(tag):
                with contextlib.suppress(ValueError, TypeError):
                    footers[name] = self._unpack(name, tag, row[1])
                    entries[name] = tag, footers[name]
        return footers

    def remember(self, name: str, tag: Tag, footer: T) -> None:
        """Keep what was read of a version of a file whose next version is sure to have another tag."""
        self._entries()[name] = tag, footer
        if self._on_disk and (packed := self._pack(footer)) is not None:
            self._new[name] = [tag, packed]

    def forget_others(self, names: Collection[str]) -> None:
        """Forget the files that the last listing of the whole place does not have."""
        entries = self._entries()
        for name in [name for name in list(entries) if name not in names]:  # a copy: other threads change it
            entries.pop(name, None)

    def load(self) -> None:
        """Know what the disk has, until `save`: it is as large as all footers together."""
        if self._on_disk:
            self._rows = self._read()

    def save(self, names: Collection[str]) -> None:
        """Keep on the disk what is known of the files of a listing, if anything was read."""
        if self._new:
            rows = (self._rows or self._read()) | self._new
            files = {name: row for name, row in rows.items() if name in names}
            document = {"format": _FORMAT, "place": self._place, "files": files}
            disk_cache.write_bytes(self._file, gzip.compress(json.dumps(document).encode(), 1))
        self._rows, self._new = {}, {}

    def _entries(self) -> dict[str, tuple[Tag, T]]:
        with _lock:
            entries = _places[self._place] = _places.pop(self._place, {})
            if len(_places) > _MOST_PLACES:
                del _places[next(iter(_places))]
        return entries

    def _read(self) -> dict[str, list[Any]]:
        content = disk_cache.read_bytes(self._file)
        try:
            document = json.loads(gzip.decompress(content)) if content else {}
        except (OSError, EOFError, zlib.error, ValueError):
            return {}
        is_own = (document.get("format"), document.get("place")) == (_FORMAT, self._place)
        return document["files"] if is_own else {}


def forget_all() -> None:
    """Forget what the process remembers, as if it had just started."""
    with _lock:
        _places.clear()
