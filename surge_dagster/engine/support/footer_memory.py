"""What was read at the ends of files, remembered by the process so that it reads each version of a
file once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

# of a version of a file, as a listing shows it: its size, and what changes with its content
Tag = tuple[int, str]
T = TypeVar("T")

# of each place, tag and footer by name
_places: dict[str, dict[str, tuple[Tag, Any]]] = {}


class FooterMemory(Generic[T]):
    """The remembered footers of one place; an entry counts only for the name and the tag that it
    was read under.

    Args:
        identity: distinguishes the place from every other one.
    """

    def __init__(self, identity: str) -> None:
        self._entries: dict[str, tuple[Tag, T]] = _places.setdefault(identity, {})

    def known(self, tags: Mapping[str, Tag]) -> dict[str, T]:
        """Return what is known of these versions of files; a file that is not among them has to be
        read."""
        footers: dict[str, T] = {}
        for name, tag in tags.items():
            entry = self._entries.get(name)
            if entry is not None and entry[0] == tag:
                footers[name] = entry[1]
        return footers

    def remember(self, name: str, tag: Tag, footer: T) -> None:
        """Keep what was read of a version of a file; its next version must have another tag."""
        self._entries[name] = tag, footer

    def forget_others(self, names: Collection[str]) -> None:
        """Forget the files that the last listing of the whole place does not have."""
        for name in list(self._entries):  # a copy: other threads change it
            if name not in names:
                self._entries.pop(name, None)


def forget_all() -> None:
    """Forget what the process remembers, as if it had just started."""
    for entries in _places.values():
        entries.clear()
