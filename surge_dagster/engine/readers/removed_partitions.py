"""Partitions that were removed from the source and still have files, in one small object of their
space.

A run over the whole catalog finds them, records them in `removed_partitions.json`, which readers
leave out, and deletes their files where that is set. An entry holds for one version of a file: a
partition that is embedded again is read. One that comes back unchanged is read after the next such
run. Of a file that cannot be read now the entry stays.

A source that is mounted wrongly lists too little. So more than a tenth of the catalog at a time is
neither recorded nor deleted; what was recorded before is no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping
from contextlib import suppress

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.files.formats import PublishedFile, file_name
from surge_dagster.engine.files.opening import usable_file
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Found, OutputState
from surge_dagster.engine.output.spaces import write_document
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.keys import encode_key, is_hashed

_LARGEST_SHARE = 0.1  # of the catalog, at a time; one partition always may
# by key: the source version and the version of the rows of its file
Versions = Mapping[str, list[str]]


def is_removed(key: str, listed: Container[str]) -> bool:
    """Whether the source lacks a partition; a long key that cannot be read is listed as the name of
    its folder."""
    return key not in listed and not (is_hashed(name := encode_key(key)) and name in listed)


def may_be_removed(partitions: int, total: int) -> bool:
    """Whether so many of a catalog's partitions may have been removed at a time."""
    return partitions <= max(1, int(_LARGEST_SHARE * total))


def find_removed(
    outputs: OutputState, space: Space, listed: Collection[str]
) -> dict[str, PublishedFile]:
    """The valid files, by key, whose partitions the source does not list; list the files first,
    then the source."""
    files: dict[str, PublishedFile] = {}
    for name, found in outputs.files_beside(listed).items():
        with suppress(DataError, TransientError):
            file = usable_file(outputs.store, space, name, found)
            if is_removed(file.facts.partition_key, listed):
                files[file.facts.partition_key] = file
    return files


def record_removed(
    outputs: OutputState, space: Space, files: Mapping[str, PublishedFile], listed: Collection[str]
) -> str | None:
    """Record these files, which `find_removed` gave for what the source lists, as those that
    readers leave out.

    Returns:
        Why the listing is not trusted; then those that are new stay readable, and nothing may be
            deleted.
    """
    store = outputs.store
    known, found = (
        recorded_removed(store, space),
        {key: _version(file) for key, file in files.items()},
    )
    new = sorted(key for key in found if known.get(key) != found[key])
    total = len(listed) + len(new)
    is_trusted = not new or (len(listed) > 0 and may_be_removed(len(new), total))
    entries = {key: version for key, version in found.items() if is_trusted or key not in new}
    unread = {
        name
        for name, file in outputs.files_beside(listed).items()
        if isinstance(file, TransientError)
    }
    kept = [
        key for key in known if is_removed(key, listed) and file_name(space.name, key) in unread
    ]
    entries |= {key: known[key] for key in kept}
    if entries != known:
        write_document(store, _name(space), {"partitions": entries}, lambda: None)
    if is_trusted:
        return None
    return (
        f"{len(new):,} of {counted(total, 'partition')} were removed from the source, such as {new[0]!r}. Nothing was "
        f"deleted or hidden from readers, since at most {_LARGEST_SHARE:.0%} of the catalog may be at a time; "
        "everything else was embedded. If the source's listing is incomplete, fix it. If the partitions are no longer "
        f"needed, remove their files from {store.location(space.name)!r}"
    )


def recorded_removed(store: Store, space: Space) -> Versions:
    """The recorded files, those of a derived space as its parent has them; a `ConfigError` for a
    damaged record."""
    try:
        with store.open(_name(space)) as source:
            entries = dict(json.loads(source.read())["partitions"])
        for key in entries:
            encode_key(key)
        return entries
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{store.location(_name(space))!r} cannot be used: {error}. Remove it; until the next run over the whole "
            "catalog writes it again, readers get removed partitions, too."
        ) from error


def without_removed(
    files: Mapping[str, Found | TransientError], removed: Versions
) -> dict[str, Found | TransientError]:
    """The files that are not recorded as those of removed partitions."""
    return {
        name: file
        for name, file in files.items()
        if not isinstance(file, PublishedFile)
        or removed.get(file.facts.partition_key) != _version(file)
    }


def _version(file: PublishedFile) -> list[str]:
    return [file.facts.source_version, file.facts.rows_version]


def _name(space: Space) -> str:
    return f"{space.derived.parent if space.derived else space.name}/removed_partitions.json"
