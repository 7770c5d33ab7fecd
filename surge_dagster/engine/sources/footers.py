"""What the Parquet files of a listing declare about themselves, read once for each version of a file.

It is remembered for as long as the process lives; for a bucket also in a file of the project's cache folder, one per
source, which can be deleted at any time. An entry counts only for the token that it was read under.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Generator, Sequence
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
_FEW = 1000
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
        return {file.relative: end for file, end in zip(files, self.each(files), strict=True)}

    def each(self, files: Sequence[SourceFile]) -> Generator[End]:
        """The footers of listed files, in their order; in a bucket, those of the next files are read meanwhile.

        Raises:
            StoreUnavailable: the bucket does not answer at all.
        """
        known = _known.setdefault(self._place, {})
        if not self._is_loaded and any(self._is_unread(file) for file in files):
            self._is_loaded = True
            for name, entry in self._load().items():
                known.setdefault(name, entry)
        unread = [file for file in files if self._is_unread(file)]
        with contextlib.closing(self._files.ends(unread, read_footer)) as ends:
            for file, entry in [(file, None if self._is_unread(file) else known.get(file.relative)) for file in files]:
                if not _has_footer(file):
                    yield None
                elif entry is not None:
                    yield entry[1]
                else:
                    yield self._read(file, next(ends))

    def _read(self, file: SourceFile, end: Footer | Exception) -> End:
        """What was read of a file; it is remembered, unless another reading may give something else."""
        if isinstance(end, FileNotFoundError):  # it was replaced since; reading it says so
            return None
        if isinstance(end, TransientError) or (not isinstance(end, Footer) and is_systems(end)):
            return end
        footer = end if isinstance(end, Footer) else None
        if self._files.is_settled(file):
            _known[self._place][file.relative] = (file.state or file.token, footer)
            self._has_new = True
        return footer

    def save(self, files: Sequence[SourceFile]) -> None:
        """Keep the footers of a bucket's listed files on the disk, if any is new there."""
        known = _known.get(self._place, {})
        listed = {file.relative: entry for file in files if (entry := known.get(file.relative))}
        if len(known) > 2 * len(listed) + _FEW:  # those of files that are gone are forgotten
            _known[self._place] = listed
        if not (self._files.is_remote and self._has_new):
            return
        self._has_new = False
        rows = {name: [token, *astuple(footer)] for name, (token, footer) in listed.items() if footer is not None}
        document = json.dumps({"format": _FORMAT, "files": rows}).encode()
        disk_cache.write_bytes(self._cache, gzip.compress(document, 1))

    def _is_unread(self, file: SourceFile) -> bool:
        known = _known[self._place].get(file.relative)
        return _has_footer(file) and (known is None or known[0] != (file.state or file.token))

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
