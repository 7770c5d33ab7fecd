"""Which space of an output its readers use: one small object at its root, `current_space.json`.

An output with one space needs none. Before a second one is begun, the one that is there is named in it, so that whoever
reads goes on reading what was complete; the name is changed by a switch alone (`surge_dagster.engine.switching`). It is
replaced as a whole, and only in the place of the one that the writer has seen: two switches never interleave.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from surge_dagster.engine.errors import ConfigError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.spaces import SPACE_FILE, list_spaces
from surge_dagster.engine.store.store import Store

CURRENT_FILE = "current_space.json"
_FORMAT = 1


class SwitchedMeanwhile(SurgeError):
    """Somebody else changed the current space since it was looked up; nothing was written."""


@dataclass(frozen=True, slots=True)
class CurrentSpace:
    """What `current_space.json` says.

    Attributes:
        space: name of the space that readers use.
        previous: the one before it; None for the first.
        number: how many have been current up to this one, itself included; tells two turns of one space apart.
    """

    space: str
    previous: str | None = None
    number: int = 1


def read_current(store: Store) -> CurrentSpace | None:
    """What the output says is current; None where it says nothing.

    Raises:
        ConfigError: the object is there and cannot be used.
    """
    where = store.location(CURRENT_FILE)
    try:
        with store.open(CURRENT_FILE) as source:
            raw = source.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{where!r} cannot be read: {error}") from error
    try:
        document = json.loads(raw)
        if document["format"] != _FORMAT:
            raise ValueError(f"it has the format {document['format']!r}; this version knows {_FORMAT}")
        space, previous, number = document["space"], document["previous"], document["number"]
        if not isinstance(space, str) or not isinstance(previous, str | None) or not isinstance(number, int):
            raise TypeError("space and previous are names, and number counts")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where!r} cannot be used ({type(error).__name__}: {error}). Remove it and switch to a space again; until "
            "then, name the space to read."
        ) from error
    return CurrentSpace(space, previous, number)


def space_of_readers(store: Store) -> Space:
    """The space to read where none is named: the current one, or the only one.

    Raises:
        ConfigError: there are no embeddings, the current space is not there, or there are several spaces and none is
            current.
    """
    # In this order: a second space is begun only after the first one was made current.
    spaces = {space.name: space for space in list_spaces(store)}
    current = read_current(store)
    if current is None:
        if len(spaces) == 1:
            return next(iter(spaces.values()))
        if not spaces:
            raise ConfigError(_nothing_in(store))
        raise ConfigError(
            f"{store.url!r} holds several spaces, whose vectors cannot be compared: {', '.join(spaces)}. Name one, or "
            "make one of them the current space (`surge-dagster switch`, or materialize `current_space`)."
        )
    if current.space not in spaces:  # begun since they were listed, or gone
        spaces = {space.name: space for space in list_spaces(store)}
    if current.space not in spaces:
        held = ", ".join(spaces) or "none"
        raise ConfigError(
            f"{store.location(CURRENT_FILE)!r} names the space {current.space!r}, and the output holds {held}. Put its "
            "folder back, switch to another one, or name the space to read."
        )
    return spaces[current.space]


def named_space(store: Store, name: str) -> Space:
    """A space by its name.

    Raises:
        ConfigError: the output has no such space.
    """
    spaces = {space.name: space for space in list_spaces(store)}
    if not spaces:
        raise ConfigError(_nothing_in(store))
    if name not in spaces:
        raise ConfigError(f"{store.url!r} has no space {name!r}; it holds {', '.join(spaces)}.")
    return spaces[name]


def keep_current(store: Store, beginning: Space) -> None:
    """Before a space is begun beside the only one there is: make that one current, so that readers stay with it.

    Args:
        beginning: the space that a run is about to write to.
    """
    spaces = list_spaces(store)
    if len(spaces) == 1 and spaces[0].spec_sha256 != beginning.spec_sha256 and read_current(store) is None:
        try:
            write_current(store, spaces[0].name, seen=None)
        except SwitchedMeanwhile:
            return  # another run did the same


def write_current(store: Store, space: str, *, seen: CurrentSpace | None) -> CurrentSpace:
    """Make a space current; whether it may be is for the caller to know.

    Args:
        space: name of the space.
        seen: what `read_current` gave when that was decided; the switch is refused when it says something else now.

    Raises:
        SwitchedMeanwhile: somebody else was faster.
        TransientError: it cannot be written.
    """
    made = CurrentSpace(space, seen.space if seen else None, seen.number + 1 if seen else 1)

    def require_as_seen() -> None:
        found = read_current(store)
        if found != seen:
            now = f"the space {found.space!r} was made current" if found else "the current space was taken back"
            raise SwitchedMeanwhile(f"{now} in {store.url!r} meanwhile. Nothing was changed; look, then switch again.")

    document = {"format": _FORMAT, "space": made.space, "previous": made.previous, "number": made.number}
    try:
        with store.create(CURRENT_FILE) as upload:
            upload.write(json.dumps(document, indent=2).encode() + b"\n")
            upload.publish(require_as_seen)
        store.sync("")
    except OSError as error:
        raise TransientError(f"cannot write {store.location(CURRENT_FILE)!r}: {error}. Then switch again.") from error
    return made


def _nothing_in(store: Store) -> str:
    if any(stored.name == SPACE_FILE for stored in store.list("")):
        return f"{store.url!r} is the folder of one space; give the folder above it, and the space by name."
    return f"{store.url!r} holds no embeddings. Run `surge-dagster embed`, or give another output."
