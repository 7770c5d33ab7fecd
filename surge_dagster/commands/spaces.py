"""The space and the source that a command reads: of the settings, else as recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from surge_dagster.commands.settings import SPACE
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import HASH_SCHEME, EncodingSpec, Space
from surge_dagster.engine.output.current_space import named_space, read_current, space_of_readers
from surge_dagster.engine.output.spaces import (
    find_space,
    list_spaces,
    recorded_catalog,
    space_of_spec,
)
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store.store import Store
from surge_dagster.terminal import complain

SpaceName = Annotated[
    str | None, typer.Option("--space", help="Name of the space, derived ones too.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Load the model that only the output names.")]


def existing_space(settings: Settings, store: Store) -> Space:
    spec = settings.encoding_spec()
    space = find_space(store, spec)
    if space is not None:
        return space
    expected = spec.resolve()
    space = space_of_spec(store, expected.spec_sha256)
    if space is not None:
        return space
    # made with other prompts of the same model in a folder
    before = find_space(store, expected.requested)
    if before is not None and before.model_digest == expected.model_digest:
        return before
    held = ", ".join(space.name for space in list_spaces(store)) or "none"
    raise ConfigError(
        f"the output {store.url!r} has no embeddings of the space {expected.name}; its spaces are: "
        f"{held}. Name the model they were made with (--model), or run `surge-dagster embed` first."
    )


def recorded_source(settings: Settings, store: Store, space: Space) -> Source:
    """Open the source as the last run of the space did; complain if it is another catalog."""
    recorded = recorded_catalog(store, space)
    settings = settings.as_recorded(recorded)
    given = settings.record(settings.source).for_output(store)
    if recorded is not None and not given.is_same(recorded):
        complain(
            f"the space {space.name} holds the catalog {recorded.shown!r}, and {given.shown!r} is "
            "read"
        )
    return settings.open_source(space.loadable)


def describes_space(settings: Settings) -> bool:
    return not settings.model_fields_set.isdisjoint(SPACE)


def space_to_read(
    settings: Settings,
    store: Store,
    described: bool,
    yes: bool,
    name: str | None = None,
    *,
    queries: bool = False,
) -> tuple[Space, EncodingSpec]:
    """Return a space and the spec that loads its model.

    The space is that of the name, else of the settings, else the current one, else the only one.
    A model that only the output names is loaded only with `--yes`: somebody else may have written
    it.

    Args:
        queries: whether the model encodes queries; documents of a derived space need no model.
    """
    spec = settings.encoding_spec()
    if described and name is None:
        space = existing_space(settings, store)
        return space, space.loadable_from(spec)
    if name is None and read_current(store) is None and (space := find_space(store, spec)):
        return space, space.loadable_from(spec)
    space = space_of_readers(store) if name is None else named_space(store, name)
    asked = find_space(store, spec)
    if asked is not None and asked.spec_sha256 == space.encoder_sha256:
        return space, space.loadable_from(spec)
    if space.derived and not queries:  # its vectors are computed without a model
        return space, space.loadable
    _require_trusted(settings, store, space, yes)
    return space, space.loadable


def _require_trusted(settings: Settings, store: Store, space: Space, yes: bool) -> None:
    """Refuse a model, or code of a model, that only the output names."""
    model = space.loadable.model
    trusted = space.loadable.trust_remote_code
    if trusted is not None and trusted != settings.trust_remote_code:
        raise ConfigError(
            f"the output {store.url!r} names code of the model {model!r}. If you trust that code, "
            f"load it with --trust-remote-code {trusted} and --model {model}."
        )
    if not yes and not model.startswith(HASH_SCHEME) and model != settings.model:
        raise ConfigError(
            f"the output {store.url!r} names the model {model!r}, which the settings do not. If "
            "you trust the output, load it with --yes."
        )
