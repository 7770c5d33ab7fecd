"""The demo catalog: the docstrings of the Python packages that are installed here.

Every machine that can run this project has this catalog on it: real text, in partitions of very different sizes, that
changes the way catalogs do. A partition is an installed distribution; a row is one of its public classes, functions
or methods, named by its qualified name, in the order of the files' paths and of the lines in them. With the project's
own dependencies that is about 60,000 texts in 140 partitions, from 1 to 14,600.

A partition's source version is the distribution's version and the hash of its RECORD, the list of its installed
files and their hashes. Looking at it takes milliseconds, so a build without an upgrade parses and writes nothing.

Parsing runs at 2.5 MB/s on a core, and there are 200 MB of sources. A capped catalog must not need all of that, so
docstrings are first counted with a regular expression, at 200 MB/s. Each distribution's share of the limit is in
proportion to its count and at least 1, which keeps the heavy tail; then files are parsed, those with many docstrings
for their size first, until the share is there. The factor between count and share is remembered, so that upgrading one
distribution changes one partition, and not all of them by a little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from surge_dagster.catalogs.distributions import Distribution, installed_distributions
from surge_dagster.catalogs.docstrings import Row, SourceFile, count_docstrings, extract
from surge_dagster.catalogs.folder import ROW_GROUP_ROWS, CatalogFolder, CatalogSummary
from surge_dagster.catalogs.parsers import parser_pool
from surge_dagster.engine.errors import ConfigError

# Part of a limit that is left free at first, so that distributions can grow without moving the others' shares.
_ROOM = 0.02
# Once less than this part of the limit is used, the shares are dealt out anew.
_LEAST_USE = 0.9
_TASK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _Known:
    """What was learnt about one version of a distribution; `docstrings` is the quick count."""

    version: str
    docstrings: int
    empty: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """Files of one distribution that one process parses in one go, with estimates of what it reads and finds."""

    name: str
    files: Sequence[SourceFile]
    at_most: int | None
    cost_bytes: int
    texts: int


def build_demo_catalog(
    out: Path,
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    search_path: Sequence[str] | None = None,
) -> CatalogSummary:
    """Bring the catalog in `out` up to date with what is installed here.

    Args:
        out: the catalog's folder, made when it is missing.
        limit: texts in all, at most; None takes every text there is.
        progress: called with the texts found so far and in all, both estimated.
        search_path: folders that distributions are looked for in; where Python imports from, unless told.

    Raises:
        ConfigError: the limit is below 1, or the folder can't be used or holds something else.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"a demo catalog needs a limit of at least 1 text, not {limit}")
    folder = CatalogFolder(Path(out), "demo")
    installed = {found.name: found for found in installed_distributions(search_path)}
    memory = folder.memory()
    partitions: dict[str, int] = {}
    written = 0

    with parser_pool() as pool:
        known = _learn(pool, installed, memory.get("distributions", {}))
        scale: float | None = None
        shares: dict[str, int | None] = dict.fromkeys(installed)
        if limit is not None:
            counts = {name: facts.docstrings for name, facts in known.items()}
            scale, dealt = share_out(counts, limit, memory.get("scale") if memory.get("limit") == limit else None)
            shares = {**dealt}
        stale: list[str] = []
        for name, share in shares.items():
            rows = _rows_held(folder, installed[name], share)
            if rows is not None:
                partitions[name] = rows
            elif not known[name].empty:
                stale.append(name)

        tasks = [task for name in stale for task in _tasks(installed[name], shares[name], known[name])]
        for name, rows in _parse(pool, tasks, progress):
            known[name] = replace(known[name], empty=not rows)
            if rows:
                folder.write(name, _version(installed[name], shares[name], len(rows)), _row_groups(rows))
                partitions[name] = len(rows)
                written += 1

    removed = folder.keep_only(partitions)
    folder.remember(
        {"limit": limit, "scale": scale, "distributions": {name: asdict(facts) for name, facts in known.items()}}
    )
    return CatalogSummary(len(partitions), sum(partitions.values()), written, len(partitions) - written, removed)


def share_out(counts: Mapping[str, int], limit: int, scale: float | None = None) -> tuple[float, dict[str, int]]:
    """Deal out `limit` rows in proportion to `counts`, at least one each, and say by which factor.

    An earlier factor is kept for as long as it uses the limit well. When there are more names than rows, those with
    the largest counts get one each.
    """
    if len(counts) >= limit:
        return 0.0, dict.fromkeys(sorted(counts, key=lambda name: (-counts[name], name))[:limit], 1)

    def shares(factor: float) -> dict[str, int]:
        return {name: max(1, math.floor(max(1, count) * factor)) for name, count in counts.items()}

    def total(factor: float) -> int:
        return sum(shares(factor).values())

    if scale is None or not _LEAST_USE * limit <= total(scale) <= limit:
        aim = max(len(counts), math.floor(limit * (1 - _ROOM)))
        scale, too_much = 0.0, float(limit)
        for _ in range(64):
            middle = (scale + too_much) / 2
            scale, too_much = (middle, too_much) if total(middle) <= aim else (scale, middle)
    return scale, shares(scale)


def _learn(
    pool: ProcessPoolExecutor, installed: Mapping[str, Distribution], remembered: Mapping[str, Mapping[str, Any]]
) -> dict[str, _Known]:
    """What is known of each distribution; of versions that the last build didn't meet, the docstrings are counted."""
    known = {
        name: _Known(facts["version"], facts["docstrings"], facts["empty"])
        for name, facts in remembered.items()
        if name in installed and facts["version"] == installed[name].version
    }
    new = [name for name in installed if name not in known]
    counts = pool.map(count_docstrings, [installed[name].sources() for name in new]) if new else ()
    known.update((name, _Known(installed[name].version, count)) for name, count in zip(new, counts, strict=True))
    return known


def _version(distribution: Distribution, share: int | None, rows: int) -> str:
    """The source version: rows that were cut at a share depend on the share too."""
    return distribution.version if share is None or rows < share else f"{distribution.version}+{share}"


def _rows_held(folder: CatalogFolder, distribution: Distribution, share: int | None) -> int | None:
    """The number of rows of the distribution's file where it is as a build would make it now, else None."""
    held = folder.held(distribution.name)
    if held is None or (share is not None and held.rows > share):
        return None
    return held.rows if held.version == _version(distribution, share, held.rows) else None


def _tasks(distribution: Distribution, share: int | None, known: _Known) -> Iterator[_Task]:
    """The parsing of one distribution: in one piece where it ends at a share, else cut for the cores to divide."""
    files = distribution.sources()
    size = sum(file.size for file in files)
    density = known.docstrings / max(1, size)
    if share is not None:
        part = min(1.0, share / max(1, known.docstrings))
        yield _Task(distribution.name, files, share, round(size * part), min(share, known.docstrings))
        return
    start = piece = 0
    for stop, file in enumerate(files, start=1):
        piece += file.size
        if piece >= _TASK_BYTES or stop == len(files):
            yield _Task(distribution.name, files[start:stop], None, piece, round(piece * density))
            start, piece = stop, 0


def _parse(
    pool: ProcessPoolExecutor, tasks: Sequence[_Task], progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, list[Row]]]:
    """Each distribution's rows as soon as all of its tasks are done; of equal ids the first stays."""
    pieces: dict[str, list[list[Row] | None]] = {}
    places: list[int] = []
    for task in tasks:
        places.append(len(pieces.setdefault(task.name, [])))
        pieces[task.name].append(None)
    # The longest first: nothing long is left over for the end, when only one core has something to do.
    order = sorted(range(len(tasks)), key=lambda index: -tasks[index].cost_bytes)
    futures = {pool.submit(extract, tasks[index].files, tasks[index].at_most): index for index in order}
    done, total = 0, sum(task.texts for task in tasks)
    for future in as_completed(futures):
        index = futures.pop(future)
        name = tasks[index].name
        pieces[name][places[index]] = future.result()
        done += tasks[index].texts
        if progress is not None:
            progress(done, total)
        whole = [piece for piece in pieces[name] if piece is not None]
        if len(whole) == len(pieces[name]):
            del pieces[name]
            merged: dict[str, str] = {}
            for row_id, text in chain.from_iterable(whole):
                merged.setdefault(row_id, text)
            yield name, list(merged.items())


def _row_groups(rows: Sequence[Row]) -> Iterator[tuple[pa.Array, pa.Array]]:
    for start in range(0, len(rows), ROW_GROUP_ROWS):
        ids, texts = zip(*rows[start : start + ROW_GROUP_ROWS], strict=True)
        yield pa.array(ids, pa.string()), pa.array(texts, pa.string())
