"""Questions about the output that runs, the sensor and the checks share."""

from __future__ import annotations

import logging

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.freshness import OutputState, Status
from surge_dagster.engine.output.space_target import receipt_of
from surge_dagster.engine.output.spaces import find_space, list_spaces, unsupported_spaces
from surge_dagster.engine.report import Receipt
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.names import CatalogNames

log = logging.getLogger(__name__)


class SpaceNotBegun(ConfigError):
    """The settings mean a space that the output does not have beside those that it has: a person's to begin."""


def published(outputs: OutputState, key: str) -> Receipt | None:
    """The receipt of a valid file of the space that is there already."""
    file = outputs.file(key)
    return None if file is None or file.facts.space != outputs.space else receipt_of_fresh(outputs, file)


def receipt_of_fresh(outputs: OutputState, file: PublishedFile) -> Receipt:
    """The receipt of a file of the space that was there already."""
    return receipt_of(file.facts, file.stored, outputs.store.location(file.stored.name), action="fresh")


def known_space(names: CatalogNames, store: Store, spec: EncodingSpec, *, unattended: bool) -> Space | None:
    """The space that the output has for a spec, found without a model; None when it would have to be begun.

    Raises:
        SpaceNotBegun: unattended, and the output holds other spaces only: a model's first run is a person's to launch.
        ConfigError: the output cannot be read, or not be one.
        TransientError: the store does not answer.
    """
    space = find_space(store, spec)
    if space is None and unattended:
        refuse_to_begin(names, store, spec)
    return space


def refuse_to_begin(names: CatalogNames, store: Store, spec: EncodingSpec) -> None:
    """Leave it to a person to begin a space for a spec, unless it is the first one of an empty output.

    Raises:
        SpaceNotBegun: the output holds other spaces.
    """
    if others := [*(other.name for other in list_spaces(store)), *unsupported_spaces(store)]:
        raise SpaceNotBegun(
            f"the output has no space for the model {spec.model!r} with these settings; it holds {', '.join(others)}. "
            "A space is never begun unattended, since that encodes the whole catalog: launch "
            f"{names.refresh_job} by hand once."
        )


def file_states(
    by_key: dict[str, Partition], outputs: OutputState | None, fresh: dict[str, PublishedFile] | None = None
) -> dict[str, Status | None]:
    """How each partition's file stands; None where it cannot be read now, so that a run would have to refuse it.

    Args:
        by_key: the partitions, by partition key.
        outputs: the files, None where there are none yet.
        fresh: gets the files of those that are fresh, in the same order.
    """
    states: dict[str, Status | None] = dict.fromkeys(by_key, "missing")
    if outputs is None:
        return states
    outputs.look_at(partition.key for partition in by_key.values())
    for key, partition in by_key.items():
        try:
            file = outputs.file(partition.key)
        except TransientError as error:
            log.warning("%s", error)
            states[key] = None
            continue
        states[key] = status = outputs.status_of(partition, file)
        if fresh is not None and file is not None and status == "fresh":
            fresh[key] = file
    return states
