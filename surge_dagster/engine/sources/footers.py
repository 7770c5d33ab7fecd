"""What Parquet files declare at their ends, read once for each version of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.sources.formats import PARQUET_ENDINGS
from surge_dagster.engine.sources.listing import SourceFile, SourceFiles
from surge_dagster.engine.sources.parquet_files import Footer, read_footer
from surge_dagster.engine.support.footer_memory import FooterMemory, Tag
from surge_dagster.engine.support.unreadable import is_systems


class SourceFooters:
    """The footers of one place."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._memory: FooterMemory[Footer | None] = FooterMemory(f"source\0{files.identity}")

    def each(
        self, files: Sequence[SourceFile], *, is_whole: bool = False
    ) -> Generator[Footer | None]:
        """Yield the footers of listed files in their order, None for files that have none; a
        bucket's are read ahead.

        Args:
            is_whole: whether these are all files of the place; others are then forgotten.
        """
        tags = _tags(files)
        known = self._memory.known(tags)
        # Decided once: another listing of the same place may remember more files during this one.
        unread = [file for file in files if file.relative in tags and file.relative not in known]
        try:
            with contextlib.closing(self._files.ends(unread, read_footer)) as ends:
                for file in files:
                    if file.relative not in tags:
                        yield None
                    elif file.relative in known:
                        yield known[file.relative]
                    else:
                        yield self._read(file, next(ends))
        finally:
            if is_whole:
                self._memory.forget_others({file.relative for file in files})

    def _read(self, file: SourceFile, end: Footer | Exception) -> Footer | None:
        """Return the footer; None for a damaged file, and for one that the storage did not give,
        which reading it reports."""
        if isinstance(end, Footer):
            self._memory.remember(file.relative, _tag(file), end)
            return end
        if not isinstance(end, TransientError) and not is_systems(end):
            self._memory.remember(file.relative, _tag(file), None)
        return None


def _tags(files: Sequence[SourceFile]) -> dict[str, Tag]:
    return {
        file.relative: _tag(file)
        for file in files
        if not file.refusal and file.relative.lower().endswith(PARQUET_ENDINGS)
    }


def _tag(file: SourceFile) -> Tag:
    return file.size, file.token
