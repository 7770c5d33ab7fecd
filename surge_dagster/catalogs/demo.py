"""The demo catalog: public docstrings of the Python packages that are installed here.

Every machine that can run this project has this text: partitions of very different sizes that change when packages are
upgraded. A partition is an installed distribution. A row is a public class, function or method; its id is the qualified
name, and rows follow the files' paths and the lines in them. The project's own dependencies give about 60,000 texts in
140 partitions of 1 to 14,600 texts.

A partition's source version is the distribution's version and the hash of its RECORD, which lists all installed files
with their hashes. Reading it takes milliseconds, so a build without an upgrade parses and writes nothing.

Python parses 6 MB of sources per second, and 260 MB are installed. A build therefore counts docstrings with a regular
expression first (200 MB/s). With a limit, each distribution gets a share of it in proportion to its count, and its
files are parsed until the share is reached. The manifest keeps the factor between count and share, so that an upgrade
of one distribution changes the rows of this one alone.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from surge_dagster.catalogs.docstrings import SourceFile, count_docstrings, extract, module_name
from surge_dagster.catalogs.folder import CatalogFolder, CatalogSummary
from surge_dagster.engine.errors import ConfigError

# New shares leave this part of the limit free, so that distributions can grow without changing the others' shares.
_FREE_SHARE = 0.02
# Shares are computed anew when they use less than this part of the limit.
_MIN_USED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution.

    Attributes:
        name: as its metadata spells it.
        version: its version and the first 16 hex digits of its RECORD's SHA-256.
        record: the RECORD itself, a CSV table of installed files.
        folder: the folder that RECORD's paths start from.
    """

    name: str
    version: str
    record: str
    folder: Path

    def sources(self) -> tuple[SourceFile, ...]:
        """Its public Python files, in the order of their paths."""
        files = sorted(row for row in csv.reader(self.record.splitlines()) if row)
        return tuple(
            SourceFile(module, self.folder / row[0], int(row[2]) if len(row) > 2 and row[2].isdecimal() else 0)
            for row in files
            if (module := module_name(row[0]))
        )


def build_demo_catalog(
    out: Path,
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    search_path: Sequence[str] | None = None,
) -> CatalogSummary:
    """Bring the catalog in `out` up to date with the installed packages.

    Args:
        out: the catalog's folder; it is created when it is missing.
        limit: maximum number of texts; None takes all.
        progress: called with the texts extracted so far and in total, both estimated.
        search_path: folders to look for distributions in. Default: `sys.path`.

    Raises:
        ConfigError: the limit is below 1, or the folder cannot be used or holds something else.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"a demo catalog needs a limit of at least 1 text, not {limit}")
    folder = CatalogFolder(Path(out), "demo")
    installed = {distribution.name: distribution for distribution in _installed(search_path)}
    counts = _counts(installed, folder.memory.get("distributions", {}))
    scale: float | None = None
    shares: Mapping[str, int | None] = dict.fromkeys(installed)
    if limit is not None:
        earlier = folder.memory.get("scale") if folder.memory.get("limit") == limit else None
        scale, shares = share_out(counts, limit, earlier)

    rows = {name: _unchanged_rows(folder, installed[name], share) for name, share in shares.items()}
    unchanged = sum(count is not None for count in rows.values())
    expected = {name: min(counts[name], shares[name] or counts[name]) for name in rows if rows[name] is None}
    done = 0
    for name, texts in expected.items():
        extracted = extract(installed[name].sources(), shares[name])
        if extracted:
            ids, docstrings = (pa.array(column, pa.string()) for column in zip(*extracted, strict=True))
            folder.write(name, _version(installed[name], shares[name], len(extracted)), [(ids, docstrings)])
        rows[name] = len(extracted)
        done += texts
        if progress is not None:
            progress(done, sum(expected.values()))

    partitions = {name: count for name, count in rows.items() if count}
    removed = folder.keep_only(partitions)
    known = {name: {"version": installed[name].version, "docstrings": count} for name, count in counts.items()}
    folder.remember({"limit": limit, "scale": scale, "distributions": known})
    return CatalogSummary(
        partitions=len(partitions),
        texts=sum(partitions.values()),
        written=len(partitions) - unchanged,
        unchanged=unchanged,
        removed=removed,
    )


def share_out(counts: Mapping[str, int], limit: int, scale: float | None = None) -> tuple[float, dict[str, int]]:
    """Divide `limit` rows in proportion to `counts`, at least one each; returns the factor and the shares.

    An earlier factor (`scale`) is kept while it uses the limit well. When there are more names than rows, the names
    with the largest counts get one row each.
    """
    if len(counts) >= limit:
        return 0.0, dict.fromkeys(sorted(counts, key=lambda name: (-counts[name], name))[:limit], 1)

    def shares(factor: float) -> dict[str, int]:
        return {name: max(1, math.floor(max(1, count) * factor)) for name, count in counts.items()}

    def total(factor: float) -> int:
        return sum(shares(factor).values())

    if scale is None or not _MIN_USED_SHARE * limit <= total(scale) <= limit:
        target = max(len(counts), math.floor(limit * (1 - _FREE_SHARE)))
        scale, too_much = 0.0, float(limit)
        for _ in range(64):
            middle = (scale + too_much) / 2
            scale, too_much = (middle, too_much) if total(middle) <= target else (scale, middle)
    return scale, shares(scale)


def _installed(search_path: Sequence[str] | None) -> list[Distribution]:
    """The distributions in `search_path`, sorted by name, without the operating system's, which have no RECORD."""
    found: dict[str, Distribution] = {}
    for installed in metadata.distributions() if search_path is None else metadata.distributions(path=[*search_path]):
        record = installed.read_text("RECORD")
        if not record or "Name" not in installed.metadata:
            continue
        name = installed.metadata["Name"]
        version = f"{installed.version}+{hashlib.sha256(record.encode('utf-8')).hexdigest()[:16]}"
        # An import takes the first on the path; other spellings of a name mean the same distribution.
        found.setdefault(
            re.sub(r"[-_.]+", "-", name).lower(),
            Distribution(name, version, record, Path(str(installed.locate_file("")))),
        )
    return sorted(found.values(), key=lambda distribution: distribution.name)


def _counts(installed: Mapping[str, Distribution], remembered: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The quick docstring count of each distribution; versions that the last build counted are not counted again."""
    return {
        name: facts["docstrings"]
        if (facts := remembered.get(name)) and facts["version"] == distribution.version
        else count_docstrings(distribution.sources())
        for name, distribution in installed.items()
    }


def _version(distribution: Distribution, share: int | None, rows: int) -> str:
    """The source version. Rows that were cut at a share depend on the share too."""
    return distribution.version if share is None or rows < share else f"{distribution.version}+{share}"


def _unchanged_rows(folder: CatalogFolder, distribution: Distribution, share: int | None) -> int | None:
    """The number of rows in the distribution's file if a build would write the same file now, else None."""
    written = folder.written(distribution.name)
    if written is None or (share is not None and written.rows > share):
        return None
    return written.rows if written.version == _version(distribution, share, written.rows) else None
