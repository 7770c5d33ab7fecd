"""Small JSON objects of an output, such as `space.json`, each replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.store import Store


def read_document(store: Store, name: str) -> Any:
    """Return what an object holds; raises `FileNotFoundError`, or `ValueError` if it is damaged."""
    with store.open(name) as source:
        return json.loads(source.read())


def write_document(
    store: Store, name: str, document: Mapping[str, Any], still_wanted: Callable[[], None]
) -> None:
    """Publish a small JSON object as `Upload.publish` does; raises `TransientError` if the disk
    does not take it."""
    try:
        with store.create(name) as upload:
            upload.sink.write(json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")
            upload.publish(still_wanted)
        store.sync(name.rpartition("/")[0])
    except OSError as error:
        raise TransientError(
            f"cannot write {store.location(name)!r}: {error}. Make room on the disk, then run "
            "again."
        ) from error
