"""Confirmations: which version of each partition's rows a named consumer has applied.

    .changes/<space>/consumers/<encoded name>.json

A consumer is registered by its first confirmation. To forget one, remove its file. A damaged file
counts as empty, so that the consumer gets everything again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from surge_dagster.engine.output.spaces import list_spaces, write_document
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)

CHANGES = ".changes"
_SUFFIX = ".json"


def consumers(store: Store, space: str) -> list[str]:
    """Return the encoded names of the registered consumers of a space."""
    files = [stored.name.rpartition("/")[2] for stored in store.list(_folder(space))]
    return sorted(name.removesuffix(_SUFFIX) for name in files)


def confirmed_versions(store: Store, space: str, consumer: str) -> dict[str, str] | None:
    """Return the version of each partition's rows that a consumer has applied.

    Args:
        consumer: its encoded name; None is returned if it is not registered.
    """
    name = f"{_folder(space)}/{consumer}{_SUFFIX}"
    try:
        with store.open(name) as source:
            return dict(json.loads(source.read())["versions"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        place = store.location(name)
        log.warning("%s counts as empty, so that the consumer gets everything: %s", place, error)
        return None


def confirm_versions(store: Store, space: str, consumer: str, versions: Mapping[str, str]) -> None:
    """Replace the confirmations of a consumer; they are durable when this returns."""
    name = f"{_folder(space)}/{encode_key(consumer)}{_SUFFIX}"
    write_document(store, name, {"consumer": consumer, "versions": versions}, lambda: None)


def forget_elsewhere(store: Store, space: str, consumer: str) -> None:
    """Remove what a consumer has confirmed of other spaces, before its copy is of this one.

    Otherwise it would get only the latest changes when it comes back to such a space, and its copy
    would have vectors of two spaces.
    """
    own = encode_key(consumer)
    for other in list_spaces(store):
        if other.name != space and own in consumers(store, other.name):
            store.delete(f"{_folder(other.name)}/{own}{_SUFFIX}")


def _folder(space: str) -> str:
    return f"{CHANGES}/{space}/consumers"
