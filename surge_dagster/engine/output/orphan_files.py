"""What writers that died left in an output, of whichever space: a run removes it, whether or not it has work to do."""

from __future__ import annotations

import logging

from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.output.staging import STAGING
from surge_dagster.engine.store.store import Store

log = logging.getLogger(__name__)


def sweep_left_overs(store: Store, claimed: str | None = None) -> None:
    """Remove the temp files and unfinished uploads of dead writers from every space, and from what is staged of it.

    They are in nobody's way: where they cannot be removed, the log says so and the next run tries again.

    Args:
        claimed: name of a space that is left out, since whoever has claimed it has swept it.
    """
    try:
        spaces = list_spaces(store)
    except (SurgeError, OSError) as error:
        log.warning("what dead writers left in %s could not be looked for: %s", store.url, error)
        return
    for space in spaces:
        if space.name == claimed:
            continue
        try:
            store.sweep(space.name)
            store.sweep(f"{STAGING}/{space.name}")
        except (SurgeError, OSError) as error:
            log.warning("what dead writers left in %s could not be removed: %s", store.location(space.name), error)
