"""The space that the readers of an output use, named in one small object at its root:
`current_space.json`.

An output with one space needs no such object. Before a run begins a second space, it names the
first one there, so that readers keep reading what is complete; only a switch changes it
(`engine/verify/verification.py`). A writer replaces the object as a whole, and only if it
still says what the writer has read: concurrent switches never interleave.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass

from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.spaces import (
    is_folder_of_space,
    list_spaces,
    read_document,
    write_document,
)
from surge_dagster.engine.store.store import Store

CURRENT_FILE = "current_space.json"
_FORMAT = 1


class SwitchedMeanwhile(SurgeError):
    """Another switch changed the current space since it was read; nothing was written."""


@dataclass(frozen=True, slots=True)
class CurrentSpace:
    """The content of `current_space.json`.

    Attributes:
        previous: the space that was current before it; None for the first.
        number: 1 for the first current space, plus 1 at each switch, also when a space becomes
            current again.
    """

    space: str
    previous: str | None = None
    number: int = 1


def read_current(store: Store) -> CurrentSpace | None:
    """Return the content of `current_space.json`, or None if there is none; raises `ConfigError` if
    it is damaged."""
    where = store.location(CURRENT_FILE)
    try:
        document = read_document(store, CURRENT_FILE)
        if document["format"] != _FORMAT:
            raise ValueError(
                f"it has the format {document['format']!r}; this version knows {_FORMAT}"
            )
        current = CurrentSpace(document["space"], document["previous"], document["number"])
        are_names = isinstance(current.space, str) and isinstance(current.previous, str | None)
        if not are_names or not isinstance(current.number, int):
            raise TypeError("space and previous must be names, and number a number")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{where!r} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where!r} cannot be used ({type(error).__name__}: {error}). Remove it and switch to "
            "a space again; until then, name the space to read."
        ) from error
    return current


def space_of_readers(store: Store, name: str | None = None) -> Space:
    """Return the space to read: the named one, else the current one, or the only one; raises
    `ConfigError` if there is none of these."""
    if name is not None:
        return named_space(store, name)
    current = read_current(store)
    spaces = {space.name: space for space in list_spaces(store)}
    if current is None and len(spaces) > 1:
        # A run that has just begun the second space has named the first one before.
        current = read_current(store)
    if current is None:
        if not spaces:
            raise _no_embeddings(store)
        if len(spaces) > 1:
            raise ConfigError(
                f"{store.url!r} holds several spaces, whose vectors cannot be compared: "
                f"{', '.join(spaces)}. Name one, or make one of them the current space "
                "(`surge-dagster switch`, or the job `switch_current_space`)."
            )
        return next(iter(spaces.values()))
    if current.space not in spaces:
        held = ", ".join(spaces) or "none"
        raise ConfigError(
            f"{store.location(CURRENT_FILE)!r} names the space {current.space!r}, and the output "
            f"holds {held}. Put its folder back, switch to another one, or name the space to read."
        )
    return spaces[current.space]


def named_space(store: Store, name: str) -> Space:
    """Return a space by its name; raises `ConfigError` if the output does not have it."""
    spaces = {space.name: space for space in list_spaces(store)}
    if name in spaces:
        return spaces[name]
    if not spaces:
        raise _no_embeddings(store)
    raise ConfigError(f"{store.url!r} has no space {name!r}; it holds {', '.join(spaces)}.")


def keep_current(store: Store, beginning: Space) -> None:
    """Make the first space current before a run begins a second one, so that readers stay with
    it."""
    spaces = list_spaces(store)
    is_second = len(spaces) == 1 and spaces[0].spec_sha256 != beginning.spec_sha256
    if is_second and read_current(store) is None:
        with contextlib.suppress(SwitchedMeanwhile):  # another run did the same
            write_current(store, spaces[0].name, seen=None)


def write_current(store: Store, space: str, *, seen: CurrentSpace | None) -> CurrentSpace:
    """Make a space current; the caller decides whether it is fit for that.

    Args:
        seen: the result of `read_current` that the decision rests on; raises `SwitchedMeanwhile` if
            that has changed.
    """
    new = CurrentSpace(space, seen.space if seen else None, seen.number + 1 if seen else 1)

    def require_as_seen() -> None:
        current = read_current(store)
        if current != seen:
            now = f"{CURRENT_FILE} was removed"
            if current is not None:
                now = f"the space {current.space!r} was made current"
            raise SwitchedMeanwhile(
                f"{now} in {store.url!r} meanwhile. Nothing was changed; check, then switch again."
            )

    write_document(store, CURRENT_FILE, {"format": _FORMAT, **asdict(new)}, require_as_seen)
    return new


def _no_embeddings(store: Store) -> ConfigError:
    if is_folder_of_space(store):
        return ConfigError(
            f"{store.url!r} is the folder of one space; give the folder above it, and the space by "
            "name."
        )
    return ConfigError(
        f"{store.url!r} holds no embeddings. Run `surge-dagster embed`, or give another output."
    )
