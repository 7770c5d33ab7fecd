"""A file's facts from its last bytes, without taking the whole footer apart.

A run decides for every partition whether its file is fresh, from a dozen strings in the footer. Pyarrow's reader builds
schema, columns and row groups first, which takes most of the time of the decision. So the strings are looked for where
Parquet puts them: its metadata stand near the end of the footer, each entry as

    0x18 length key 0x18 length value 0x00        (Thrift's compact protocol; lengths as base-128 varints)

The digest among them guards all of them: what it confirms was written that way, wherever it was found. Everything else
is left to pyarrow, which then says what is wrong.
"""

from __future__ import annotations

from surge_dagster.engine.output.embedding_file import FORMAT, FileFacts, InvalidFile, entry_names, facts_of

END_BYTES = 8 * 1024
_MAGIC = b"PAR1"
_STRING = b"\x18"
_PATTERNS = [(key, _STRING + bytes([len(key)]) + key + _STRING) for key in entry_names(FileFacts)]


def facts_at_end(end: bytes) -> FileFacts | None:
    """The facts in a file's last bytes, `END_BYTES` of them or all; None when they cannot be told from these alone."""
    length = int.from_bytes(end[-8:-4], "little")
    if end[-4:] != _MAGIC or len(end) < 12:
        return None
    footer = end[max(0, len(end) - 8 - length) :]
    entries = {}
    for key, pattern in _PATTERNS:
        found = footer.find(pattern)
        if found < 0:
            return None
        place = found + len(pattern)
        size = footer[place]
        if size > 0x7F:  # rare, and worth the difference: this is the loop that a run's start consists of
            place, size = _long_length(footer, place)
        entries[key] = footer[place + 1 : place + 1 + size]
    try:
        return facts_of(entries, FileFacts, FORMAT)
    except InvalidFile:
        return None


def _long_length(footer: bytes, place: int) -> tuple[int, int]:
    """Last byte and value of the length that begins at `place`; what is cut off the digest refuses."""
    size = shift = 0
    for index in range(place, len(footer)):
        size |= (footer[index] & 0x7F) << shift
        if footer[index] < 0x80:
            return index, size
        shift += 7
    return len(footer), 0
