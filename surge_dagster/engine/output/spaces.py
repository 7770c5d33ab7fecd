"""Which vector spaces an output holds: one folder each, described by its `space.json`.

A space is resolved once, by the first run that writes to it. Whoever comes later, a sensor above all, finds it by the
settings that were asked for, without loading or even having the model. The twelve hex digits decide, not the slug: the
same weights under another folder name go to the folder that is there.

Several spaces were asked for by the same settings when the content of a model changed behind its name. Then the one
that was claimed last is meant, be it new or an older one whose content has come back; no unattended run claims another.
Each `space.json` has a number for each request that it answers: the highest is meant, and the first by name among
equals, as in outputs that have no numbers yet or where two runs claimed at the same moment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import EncodingSpec, FileFormat, Space, space_from_json
from surge_dagster.engine.store.store import Store

SPACE_FILE = "space.json"


def list_spaces(store: Store) -> list[Space]:
    """Every space of the output, by name.

    Raises:
        ConfigError: a space.json is damaged.
    """
    return [space for space, _ in _documents(store)]


def find_space(store: Store, spec: EncodingSpec) -> Space | None:
    """The space that was claimed for this spec last, or None when the output has none yet."""
    known = _documents(store)
    asked = spec.as_dict()
    answering = [(_turn(space, document, asked), space) for space, document in known]
    meant = max((turn for turn, _ in answering if turn is not None), default=None)
    if meant is not None:
        return next(space for turn, space in answering if turn == meant)
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

    From now on it is the one that is meant by what was asked for.

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
    own: dict[str, Any] | None = None
    space = replace(space, file_format=file_format)
    asked = space.requested.as_dict()
    turns_of_others: list[int] = []
    for known, document in _documents(store):
        if known.spec_sha256 == space.spec_sha256:
            require_format(store, known, file_format)
            space, own = replace(space, name=known.name), document
            continue
        if known.name == space.name:
            raise ConfigError(
                f"the folder {store.location(space.name)!r} holds another space (spec {known.spec_sha256[:12]}). "
                "Move it away or give another output."
            )
        turn = _turn(known, document, asked)
        turns_of_others += [] if turn is None else [turn]
    store.prepare(space.name)
    store.sweep(space.name)
    if own is None:

        def not_begun_otherwise() -> None:
            for known, _ in _documents(store):
                if known.spec_sha256 == space.spec_sha256:
                    require_format(store, known, file_format)

        _write(store, space, _claimed(space, space.to_json(), asked, turns_of_others), not_begun_otherwise)
    else:
        document = _claimed(space_from_json(own), own, asked, turns_of_others)
        if document != own:
            _write(store, space, document)
    return space


def _claimed(space: Space, document: dict[str, Any], asked: dict[str, Any], others: list[int]) -> dict[str, Any]:
    """The document of a space once it is its turn to answer a request, which these others answer too."""
    requests = _requests(space, document)
    turns = [_turn(space, document, request) or 0 for request in requests]
    if asked not in requests:
        requests, turns = [*requests, asked], [*turns, 0]
    place = requests.index(asked)
    if others and turns[place] <= max(others):
        turns[place] = max(others) + 1
    added = {"also_requested": requests[1:], "turns": turns}
    return document | {name: value for name, value in added.items() if any(value)}


def _requests(space: Space, document: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the space was asked for by."""
    return [space.requested.as_dict(), *document.get("also_requested", [])]


def _turn(space: Space, document: dict[str, Any], asked: dict[str, Any]) -> int | None:
    """The higher, the later the space was claimed by a request; None where it was not asked for by that."""
    requests = _requests(space, document)
    if asked not in requests:
        return None
    turns = document.get("turns", [])
    place = requests.index(asked)
    return turns[place] if place < len(turns) else 0  # older ones do not say it


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
            if not all(isinstance(turn, int) for turn in document.get("turns", [])):
                raise TypeError("turns are numbers")
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
