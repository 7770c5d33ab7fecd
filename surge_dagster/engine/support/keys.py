"""Partition keys as file names and back, and file names that are not UTF-8.

A key may be any non-empty string; on disk it is percent-encoded so that no key can leave its
folder, collide with another or be changed by a shell. `decode_key` reads short names back; the name
of a long key ends in a hash, and the files' metadata has the key.

A disk's names are any bytes. Python shows bytes that are not UTF-8 as lone surrogates, which no
JSON, Parquet metadata, log or database accepts: `is_text` finds such names where they are listed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote, unquote

_REVERSIBLE_BYTES = 180
_PREFIX_BYTES = 120
_PLAIN = re.compile(rf"[A-Za-z0-9_-]{{1,{_REVERSIBLE_BYTES}}}", re.ASCII)
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_LONG_NAME = re.compile(r"^.{120}~[0-9a-f]{32}$", re.DOTALL)


def is_text(name: str) -> bool:
    """Whether a name or path is UTF-8 on its disk."""
    return name.isascii() or not _NOT_UTF8.search(name)


def printable(name: str) -> str:
    """The name with each byte that is not UTF-8 percent-encoded."""
    return _NOT_UTF8.sub(lambda byte: f"%{ord(byte.group()) & 0xFF:02X}", name)


@lru_cache(maxsize=1 << 16)  # each listing needs the same keys
def encode_key(key: str) -> str:
    """The file or folder name of a key: ASCII, at most 180 bytes, different for different keys.

    Everything outside `A-Za-z0-9_-` is percent-encoded, `.` and `~` included. A name over 180 bytes
    is cut to 120 bytes, `~` and the first 32 hex digits of the key's SHA-256.
    """
    if _PLAIN.fullmatch(key):
        return key  # most keys; encoding takes twenty times as long
    if not key:
        raise ValueError("a partition key must not be empty")
    name = _percent_encoded(key)
    if len(name) <= _REVERSIBLE_BYTES:
        return name
    return f"{name[:_PREFIX_BYTES]}~{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _percent_encoded(text: str) -> str:
    try:
        # Dots could name a parent folder, and the tilde marks hashed names.
        return quote(text, safe="").replace(".", "%2E").replace("~", "%7E")
    except UnicodeEncodeError as error:
        raise ValueError(f"partition key {text!r} is not valid Unicode text") from error


def joined_key(values: Mapping[str, str]) -> str:
    """The key of a partition that several columns or levels of folders name, such as
    `lang=de/category=shoes`.

    Names and values are percent-encoded as in `encode_key`, but never cut, so that different ones
    have different keys. A single column gives its plain value.
    """
    if len(values) == 1:
        return next(iter(values.values()))
    return "/".join(
        f"{_percent_encoded(name)}={_percent_encoded(value)}" for name, value in values.items()
    )


def is_hashed(name: str) -> bool:
    """Whether a name made by `encode_key` ends in the hash of a long key, which cannot be read back
    from it."""
    return bool(_LONG_NAME.match(name))


def decode_key(name: str) -> str | None:
    """The key of a name of `encode_key` or another hive writer; None for a hashed name,
    `ValueError` for no name."""
    if not name:
        raise ValueError("a partition name must not be empty")
    if not is_text(name):
        raise ValueError(f"partition name {printable(name)!r} is not UTF-8")
    if is_hashed(name):
        return None
    try:
        return unquote(name, errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"partition name {name!r} does not decode to UTF-8 text") from error
