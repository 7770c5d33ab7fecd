"""A file's facts from its last bytes, without taking the whole footer apart.

A run decides for every partition whether its file is fresh, from a dozen strings in the footer. Pyarrow's reader builds
schema, columns and row groups first, which takes most of the time of the decision. So the strings are looked for where
our writer puts them: its metadata are a list in the footer, each entry of which is

    0x18 length key 0x18 length value 0x00        (Thrift's compact protocol; lengths as base-128 varints)

What is found is believed when the footer lies between two marks of its own, begins and ends as Parquet's does, and the
digest among the strings is right: what that confirms was written that way. Everything else is left to pyarrow, which
then says what is wrong.
"""

from __future__ import annotations

import re

from surge_dagster.engine.files.embedding_file import FileFacts, InvalidFile, entry_names
from surge_dagster.engine.files.fact_values import facts_of_values

END_BYTES = 8 * 1024
TRAILER_BYTES = 8
_MAGIC = b"PAR1"
# The version, an i32, and the head of the schema, a list of structs: the first two fields of every footer.
_BEGINNING = re.compile(rb"\x15[\x02\x04]\x19[\x2c\x3c\x4c\x5c\x6c\x7c\x8c\x9c\xac\xbc\xcc\xdc\xec\xfc]")
_KEYS = [rb"\x18" + re.escape(bytes([len(key)]) + key) + rb"\x18" for key in entry_names(FileFacts)]
_FIRST = b"\x18" + bytes([len(entry_names(FileFacts)[0])]) + entry_names(FileFacts)[0]
_LIST = rb"\x19(?:[\x1c\x2c\x3c\x4c\x5c\x6c\x7c\x8c\x9c\xac\xbc\xcc\xdc\xec]|\xfc[\x0f-\x7f])"
_LONGEST_LIST_HEAD = 3
# Lengths are not looked at: a value is what lies between two entries, and the digest knows what that was. One with a
# zero byte in it is left to pyarrow; so is whatever else does not match.
_ENTRIES = re.compile(_LIST + b"".join(key + rb"[\x80-\xff]*+.([^\x00]*+)\x00" for key in _KEYS), re.DOTALL)


def footer_bytes(end: bytes, file_bytes: int) -> int:
    """Length of a file's footer without its trailer, as the file's last bytes say it.

    Raises:
        InvalidFile: the bytes are no end of a Parquet file, or the footer does not fit into the file.
    """
    if end[-len(_MAGIC) :] != _MAGIC:
        raise InvalidFile("it does not end as a Parquet file does: it was cut off, or is something else")
    length = int.from_bytes(end[-TRAILER_BYTES : -len(_MAGIC)], "little")
    if not 0 < length <= file_bytes - TRAILER_BYTES - len(_MAGIC):
        raise InvalidFile(f"its footer is said to take {length:,} bytes of {file_bytes:,}, which cannot be")
    return length


def facts_in_footer(footer: bytes) -> FileFacts | None:
    """The facts in a whole footer, without its trailer; None when they cannot be told without taking it apart."""
    if not _BEGINNING.match(footer) or footer[-1]:
        return None
    first = footer.find(_FIRST)
    found = _ENTRIES.search(footer, max(0, first - _LONGEST_LIST_HEAD)) if first >= 0 else None
    return facts_of_values(found.groups()) if found else None
