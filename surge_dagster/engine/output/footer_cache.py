"""A cache on the local disk of what the files in a bucket state about themselves, so that they are read once.

There is one file per output and space, under the project's cache folder. It can be deleted at any time: what it does
not have is read from the bucket. An entry counts only for the name, size and etag that it was made for, and its facts
have their own digest. gzip's checksum finds a damaged file. The file is replaced as a whole: of two processes the last
one wins, and what the other one found is read again.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa

from surge_dagster.engine.files.facts import FileFacts, InvalidFile, entry_names, facts_of, guarded_metadata
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support import disk_cache

_FORMAT = "surge footers 4"


class FooterCache:
    """The facts and columns of one space's files, as they were cached; reading it never fails.

    Args:
        identity: distinguishes the output from every other one (`Store.identity`); only a digest of it is written.
        space: the space's name.
    """

    def __init__(self, identity: str, space: str) -> None:
        self._place = hashlib.sha256(f"{identity}\0{space}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._file = f"footers/{self._place}"
        self._rows = self._load()  # by name: size, etag, schema, the values of the facts, optional ones by name
        self._has_new = False

    def file(self, stored: StoredObject) -> PublishedFile | None:
        """The file that a listing shows; None where the cache does not have it for certain."""
        try:
            size, etag, schema, *values = self._rows[stored.name]
            optional = values.pop() if isinstance(values[-1], dict) else {}
            if (size, etag) != (stored.size, stored.etag):
                return None
            raw = [value.encode("utf-8", "surrogatepass") for value in values]
            entries = dict(zip(entry_names(FileFacts), raw, strict=True))
            entries |= {name.encode(): value.encode() for name, value in optional.items()}
            return PublishedFile(stored, facts_of(entries, FileFacts, _FORMAT), _columns(schema))
        except (KeyError, InvalidFile, OSError, ValueError, pa.ArrowException):
            return None

    def add(self, file: PublishedFile) -> None:
        """Keep what was read of a file."""
        name, size, etag = file.stored
        if etag:
            schema = base64.b64encode(file.columns.serialize().to_pybytes()).decode()
            entries = guarded_metadata(file.facts, _FORMAT)
            values = [entries.pop(name).decode("utf-8", "surrogatepass") for name in entry_names(FileFacts)]
            optional = {name.decode(): value.decode() for name, value in entries.items()}
            self._rows[name] = [size, etag, schema, *values, *([optional] if optional else [])]
            self._has_new = True

    def save(self, listed: Mapping[str, StoredObject]) -> None:
        """Write what is known of the objects that are listed, if anything is new."""
        if self._has_new:
            self._has_new = False
            self._rows = {name: row for name, row in self._rows.items() if name in listed}
            document = {"format": _FORMAT, "output": self._place, "files": self._rows}
            disk_cache.write_bytes(self._file, gzip.compress(json.dumps(document).encode(), 1))

    def _load(self) -> dict[str, list[Any]]:
        content = disk_cache.read_bytes(self._file)
        try:
            document = json.loads(gzip.decompress(content)) if content else {}
        except (OSError, EOFError, zlib.error, ValueError):
            return {}
        is_own = (document.get("format"), document.get("output")) == (_FORMAT, self._place)
        return document["files"] if is_own else {}


@lru_cache(maxsize=64)
def _columns(schema: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(schema)))
