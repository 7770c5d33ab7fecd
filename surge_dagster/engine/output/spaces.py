"""Which vector spaces an output holds: one folder each, described by its `space.json`.

A space is resolved once, by the first run that writes to it. Whoever comes later, a sensor above all, finds it by the
settings that were asked for, without loading or even having the model. The twelve hex digits decide, not the slug: the
same weights under another folder name go to the folder that is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.spec import EncodingSpec, FileFormat, Space, space_from_json
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.output.store import Store

SPACE_FILE = "space.json"


def list_spaces(store: Store) -> list[Space]:
    """Every space of the output, by name.

    Raises:
        ConfigError: a space.json is damaged.
    """
    return [space for space, _ in _documents(store)]


def find_space(store: Store, spec: EncodingSpec) -> Space | None:
    """The space that was made for this spec, or None when the output has none yet."""
    known = _documents(store)
    for space, document in known:
        if spec.as_dict() in [space.requested.as_dict(), *document.get("also_requested", [])]:
            return space
    if known and Path(spec.model).expanduser().is_dir():
        wanted = spec.resolve()
        return next((space for space, _ in known if space.spec_sha256 == wanted.spec_sha256), None)
    return None


def require_format(store: Store, space: Space, file_format: FileFormat) -> None:
    """Refuse to write files of another format into a space: its readers look for those of one.

    Args:
        space: as the output has it.

    Raises:
        ConfigError: its files are of the other format.
    """
    if space.file_format != file_format:
        raise ConfigError(
            f"the space {space.name} in {store.url!r} has files in the format {space.file_format!r}; "
            f"{file_format!r} was asked for. Set format to {space.file_format!r}, or write to another output; to "
            "change the format of a space, remove its folder and embed it again."
        )


def claim_space(store: Store, space: Space, file_format: FileFormat = "parquet") -> Space:
    """Make the space's folder ready for writing and describe it there; gives the space as this output has it.

    Args:
        file_format: of the files to be written.

    Raises:
        ConfigError: the output is itself a space's folder, cannot be written, has another space under that name, or has
            this one in another format.
        TransientError: its disk is full.
    """
    if any(stored.name == SPACE_FILE for stored in store.list("")):
        raise ConfigError(
            f"the output {store.url!r} is the folder of one space; give the folder above it, which holds all spaces."
        )
    document: dict[str, Any] | None = None
    space = replace(space, file_format=file_format)
    for known, found in _documents(store):
        if known.spec_sha256 == space.spec_sha256:
            require_format(store, known, file_format)
            space = replace(space, name=known.name)
            document = found
        elif known.name == space.name:
            raise ConfigError(
                f"the folder {store.location(space.name)!r} holds another space (spec {known.spec_sha256[:12]}). "
                "Move it away or give another output."
            )
    store.prepare(space.name)
    store.sweep(space.name)
    asked = space.requested.as_dict()
    if document is None:

        def not_begun_otherwise() -> None:
            for known, _ in _documents(store):
                if known.spec_sha256 == space.spec_sha256:
                    require_format(store, known, file_format)

        _write(store, space, space.to_json(), not_begun_otherwise)
    elif asked not in [document["requested"], *document.get("also_requested", [])]:
        _write(store, space, document | {"also_requested": [*document.get("also_requested", []), asked]})
    return space


def _documents(store: Store) -> list[tuple[Space, dict[str, Any]]]:
    found = []
    for folder in store.folders():
        name = f"{folder}/{SPACE_FILE}"
        try:
            with store.open(name) as source:
                raw = source.read()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{store.location(name)!r} cannot be read: {error}") from error
        try:
            document = json.loads(raw)
            space = space_from_json(document)
        except (ValueError, TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"{store.location(name)!r} cannot be used: {error}") from error
        if space.name != folder:
            raise ConfigError(
                f"{store.location(name)!r} describes the space {space.name!r}: the folder was renamed or the file "
                "copied. Give the folder its own name back, or move it away."
            )
        found.append((space, document))
    return found


def _write(
    store: Store, space: Space, document: dict[str, Any], still_wanted: Callable[[], None] = lambda: None
) -> None:
    name = f"{space.name}/{SPACE_FILE}"
    try:
        with store.create(name) as upload:
            upload.sink.write(json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")
            upload.publish(still_wanted)
        store.sync(space.name)
    except OSError as error:
        raise TransientError(
            f"cannot write {store.location(name)!r}: {error}. Make room on the disk, then run again."
        ) from error
