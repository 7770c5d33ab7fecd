"""The space of the settings: whether the output has it, and whether a run may begin it."""

from __future__ import annotations

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import find_space, list_spaces, nearest_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.catalog_resources import CatalogResources
from surge_dagster.orchestration.names import CatalogNames


def known_space(resources: CatalogResources, store: Store) -> Space | None:
    """Return the space of the settings, without loading a model; None if a run would begin it."""
    return find_space(store, resources.encoder.encoding_spec())


def require_first_space(names: CatalogNames, resources: CatalogResources, store: Store) -> None:
    """Raise unless a space that is begun would be the first one of the output."""
    others = _nearest(store, resources.encoder.encoding_spec())
    if others:
        raise ConfigError(
            f"the settings mean none of the spaces of the output {store.url!r}: {others}. Correct "
            f"the setting, or launch {names.refresh_job} by hand once: a space is never begun "
            "unattended, since that encodes the whole catalog."
        )


def existing_space(
    names: CatalogNames, resources: CatalogResources, store: Store, then: str
) -> Space:
    """Return the space of the settings, for a job that needs one."""
    space = known_space(resources, store)
    if space is None:
        others = _nearest(store, resources.encoder.encoding_spec())
        held = f"; it holds {others}" if others else ""
        raise ConfigError(
            f"the output {store.url!r} holds nothing of {resources.encoder.model!r} with these "
            f"settings yet{held}. Launch {names.refresh_job}, then {then}."
        )
    return space


def _nearest(store: Store, spec: EncodingSpec) -> str:
    return nearest_spaces(spec, [space for space in list_spaces(store) if not space.derived])
