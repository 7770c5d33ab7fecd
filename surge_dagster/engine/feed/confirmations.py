"""Confirmations: which version of each partition's rows a named consumer has applied.

    .changes/<space>/consumers/<encoded name>.json

A consumer is registered by its first confirmation. To forget one, remove its file. A damaged file
counts as empty, so that the consumer gets everything again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from surge_dagster.engine.output.spaces import list_spaces, read_document, write_document
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)

CHANGES = ".changes"


def has_consumers(store: Store, space: str) -> bool:
    """Return whether a consumer of a space is registered."""
    return any(True for _ in store.list(_folder(space)))


def confirmed_versions(store: Store, space: str, consumer: str) -> dict[str, str] | None:
    """Return the version of each partition's rows that a consumer has applied; None if it is not
    registered."""
    name = _file(space, consumer)
    try:
        return dict(read_document(store, name)["versions"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        place = store.location(name)
        log.warning("%s counts as empty, so that the consumer gets everything: %s", place, error)
        return None


def confirm_versions(store: Store, space: str, consumer: str, versions: Mapping[str, str]) -> None:
    """Replace the confirmations of a consumer; they are durable when this returns."""
    name = _file(space, consumer)
    write_document(store, name, {"consumer": consumer, "versions": versions}, lambda: None)


def forget_elsewhere(store: Store, space: str, consumer: str) -> None:
    """Remove what a consumer has confirmed of other spaces, before its copy is of this one.

    Otherwise it would get only the latest changes when it comes back to such a space, and its copy
    would have vectors of two spaces.
    """
    for other in list_spaces(store):
        if other.name != space:
            store.delete(_file(other.name, consumer))


def _file(space: str, consumer: str) -> str:
    return f"{_folder(space)}/{encode_key(consumer)}.json"


def _folder(space: str) -> str:
    return f"{CHANGES}/{space}/consumers"
