"""Partitions that were removed from the source and still have files.

A run over the whole catalog records them in `removed_partitions.json` of their space, and deletes
their files if that is set. Readers leave out what is recorded. An entry is about one version of a
file: a partition that is embedded again is read, and one that comes back unchanged is read after
the next such run.

A source that is mounted wrongly lists too little. So a run neither records nor deletes more than a
tenth of the catalog at a time, without what was recorded before.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.files.formats import PublishedFile, file_name, usable_file
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Found, OutputState
from surge_dagster.engine.output.rejected import list_name
from surge_dagster.engine.output.spaces import read_document, write_document
from surge_dagster.engine.run.staging import remove_staged
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.keys import encode_key, is_hashed

_LARGEST_SHARE = 0.1  # of the catalog, at a time; one partition always may
# by key: the source version and the version of the rows of its file
Versions = Mapping[str, list[str]]


def is_removed(key: str, listed: Container[str]) -> bool:
    """Return whether the source lacks a partition.

    A source lists a long key that it cannot read as the name of its folder.
    """
    name = encode_key(key)
    return key not in listed and not (is_hashed(name) and name in listed)


def may_be_removed(partitions: int, total: int) -> bool:
    """Return whether this number of partitions may have been removed at a time."""
    return partitions <= max(1, int(_LARGEST_SHARE * total))


class RemovalReporter(Protocol):
    """Takes what becomes of removed partitions."""

    def found(self, keys: Sequence[str], refusal: str | None) -> None:
        """Take the keys of the files, and why the listing is not trusted."""
        ...

    def deleting(self, key: str, location: str) -> None: ...

    def deleted(self, key: str) -> None: ...


def handle_removed(
    outputs: OutputState,
    space: Space,
    listed: Collection[str],
    reporter: RemovalReporter,
    *,
    delete: bool,
    without_file: Sequence[str] = (),
) -> str | None:
    """Record partitions that the source does not list, and delete their files and staged rows if
    that is set.

    Args:
        outputs: listed before the source was, so that no new partition seems removed.
        listed: the keys of the source.
        without_file: further removed keys, which have no file in this space.

    Returns:
        Why the listing is not trusted. Then what is new stays readable, and nothing is deleted.
    """
    files = find_removed(outputs, space, listed)
    refusal = record_removed(outputs, space, files, listed)
    without_file = [key for key in without_file if key not in files]
    total = len(listed) + len(without_file)
    if delete and not refusal and not may_be_removed(len(without_file), total):
        refusal = (
            f"{len(without_file):,} of {counted(total, 'partition')} were removed from the source "
            f"and have no file in {space.name}, such as {without_file[0]!r}. Nothing was deleted. "
            "If the source's listing is incomplete, fix it. Otherwise remove what is left of them"
        )
    reporter.found(list(files), refusal)
    if delete and not refusal:
        _delete(outputs, space, [*files, *without_file], reporter)
    return refusal


def _delete(
    outputs: OutputState, space: Space, keys: Sequence[str], reporter: RemovalReporter
) -> None:
    """Delete the files and staged rows of partitions."""
    deleted: list[str] = []
    for key in keys:
        name = file_name(space.name, key)
        if not outputs.is_as_listed(name):  # a run has published it
            continue
        reporter.deleting(key, outputs.store.location(name))
        outputs.store.delete(name)
        outputs.store.delete(list_name(space.name, key))
        reporter.deleted(key)
        deleted.append(key)
    remove_staged(outputs.store, space.name, deleted)


def find_removed(
    outputs: OutputState, space: Space, listed: Collection[str]
) -> dict[str, PublishedFile]:
    """Return the valid files, by key, whose partitions the source does not list."""
    files: dict[str, PublishedFile] = {}
    for name, found in outputs.other_files(listed).items():
        with suppress(DataError, TransientError):
            file = usable_file(outputs.store, space, name, found)
            if is_removed(file.facts.partition_key, listed):
                files[file.facts.partition_key] = file
    return files


def record_removed(
    outputs: OutputState, space: Space, files: Mapping[str, PublishedFile], listed: Collection[str]
) -> str | None:
    """Record files of removed partitions, which readers leave out; return why it is refused."""
    store = outputs.store
    known = recorded_removed(store, space)
    entries = {key: _version(file) for key, file in files.items()}
    new = sorted(key for key, version in entries.items() if known.get(key) != version)
    total = len(listed) + len(new)
    is_trusted = not new or (len(listed) > 0 and may_be_removed(len(new), total))
    if not is_trusted:
        for key in new:
            del entries[key]

    if entries != known:
        write_document(store, _name(space), {"partitions": entries}, lambda: None)
    if is_trusted:
        return None
    return (
        f"{len(new):,} of {counted(total, 'partition')} were removed from the source, such as "
        f"{new[0]!r}. Nothing was deleted or hidden from readers, since at most "
        f"{_LARGEST_SHARE:.0%} of the catalog may be at a time; everything else was embedded. If "
        "the source's listing is incomplete, fix it. If the partitions are no longer needed, "
        f"remove their files from {store.location(space.name)!r}"
    )


def recorded_removed(store: Store, space: Space) -> Versions:
    """Return the recorded files, those of a derived space as its parent has them.

    Raises:
        ConfigError: the record is damaged.
    """
    try:
        entries = dict(read_document(store, _name(space))["partitions"])
        for key in entries:
            encode_key(key)
        return entries
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{store.location(_name(space))!r} cannot be used: {error}. Remove it; until the next "
            "run over the whole catalog writes it again, readers get removed partitions, too."
        ) from error


def without_removed(
    files: Mapping[str, Found | TransientError], removed: Versions
) -> dict[str, Found | TransientError]:
    """Return the files that are not recorded as those of removed partitions."""
    return {
        name: file
        for name, file in files.items()
        if not isinstance(file, PublishedFile)
        or removed.get(file.facts.partition_key) != _version(file)
    }


def _version(file: PublishedFile) -> list[str]:
    return [file.facts.source_version, file.facts.rows_version]


def _name(space: Space) -> str:
    return f"{space.encoded_name}/removed_partitions.json"
