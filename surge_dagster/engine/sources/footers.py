"""What the Parquet files of a listing declare about themselves, read once for each version of a file.

It is remembered for as long as the process lives; for a bucket also in a file of the project's cache folder, one per
source, which can be deleted at any time. An entry counts only for the token that it was read under.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.sources.listing import SourceFile, SourceFiles
from surge_dagster.engine.sources.parquet_files import Footer, read_footer
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.unreadable import is_systems

# A file's footer, or why it is not given now; None where there is none: another format, or a damaged file.
End = Footer | TransientError | OSError | None

_FORMAT = "surge source footers 1"
_PARQUET = (".parquet", ".pq")
_known: dict[str, dict[str, tuple[str, Footer | None]]] = {}  # by place, then by relative name: token and footer


class SourceFooters:
    """The footers of one place.

    Args:
        files: the place.
    """

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._place = hashlib.sha256(files.identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._cache = f"source-footers/{self._place}"
        self._is_loaded = not files.is_remote
        self._has_new = False

    def of(self, files: Sequence[SourceFile]) -> dict[str, End]:
        """The footers of listed files, by relative name.

        Raises:
            StoreUnavailable: the bucket does not answer at all.
        """
        ends: dict[str, End] = {}
        known = _known.setdefault(self._place, {})
        if not self._is_loaded and any(self._is_unread(file) for file in files):
            self._is_loaded = True
            for name, entry in self._load().items():
                known.setdefault(name, entry)
        unread = [file for file in files if self._is_unread(file)]
        for file, end in zip(unread, self._files.ends(unread, read_footer), strict=True):
            if isinstance(end, FileNotFoundError):  # it was replaced since; reading it says so
                ends[file.relative] = None
            elif isinstance(end, TransientError) or (not isinstance(end, Footer) and is_systems(end)):
                ends[file.relative] = end
            else:
                footer = ends[file.relative] = end if isinstance(end, Footer) else None
                if self._files.is_settled(file):
                    known[file.relative] = (file.token, footer)
                    self._has_new = True
        for file in files:
            ends.setdefault(file.relative, known.get(file.relative, ("", None))[1] if _has_footer(file) else None)
        return ends

    def save(self, files: Sequence[SourceFile]) -> None:
        """Keep the footers of a bucket's listed files on the disk, if any is new there."""
        if not (self._files.is_remote and self._has_new):
            return
        self._has_new = False
        known = _known.get(self._place, {})
        rows = {
            file.relative: [file.token, *astuple(entry[1])]
            for file in files
            if (entry := known.get(file.relative)) and entry[0] == file.token and entry[1] is not None
        }
        document = json.dumps({"format": _FORMAT, "files": rows}).encode()
        disk_cache.write_bytes(self._cache, gzip.compress(document, 1))

    def _is_unread(self, file: SourceFile) -> bool:
        known = _known[self._place].get(file.relative)
        return _has_footer(file) and (known is None or known[0] != file.token)

    def _load(self) -> dict[str, tuple[str, Footer | None]]:
        content = disk_cache.read_bytes(self._cache)
        try:
            document = json.loads(gzip.decompress(content)) if content else {}
            rows = document["files"] if document.get("format") == _FORMAT else {}
            return {name: (token, Footer(*values)) for name, (token, *values) in rows.items()}
        except (OSError, EOFError, zlib.error, ValueError, TypeError):
            return {}


def _has_footer(file: SourceFile) -> bool:
    return not file.refusal and file.relative.lower().endswith(_PARQUET)
