"""Fresh files that are not on record, told to Dagster without a run: what a run lost its events of, or another made.

A footer says what a file shall hold and not whether it does, so each file is read beside its source first, as a run
reads what it publishes. How much of that one tick does is bounded, and files too large for it are left to runs. A file
that does not read back counts as missing in this tick: a run is asked for, which reads it too and encodes its partition
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState, PublishedFile
from surge_dagster.engine.report import Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration import lineage
from surge_dagster.orchestration.lineage import Catalogued
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outputs import receipt_of_fresh
from surge_dagster.orchestration.partition_events import AnyEvent
from surge_dagster.orchestration.read_back import Found, ReadBack

log = logging.getLogger(__name__)

# Dagster gives a tick a minute, and the rest of it needs some of that. What a bucket has not given by then is given up;
# on a disk a file that is begun is read to its end.
_SECONDS = 20
_FILE_BYTES = 32 * 1024 * 1024
_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class Adoptions:
    """What became of the files that one tick looked at.

    Attributes:
        events: a materialization for each file that was read back.
        damaged: partition keys whose files were not what they say.
        too_large: files that only a run reads back.
    """

    events: list[AnyEvent] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    too_large: int = 0


def adopt(
    names: CatalogNames,
    outputs: OutputState,
    space: Space,
    candidates: Mapping[str, tuple[Partition, PublishedFile]],
    catalogued: Catalogued,
    room: int,
) -> Adoptions:
    """Read files back, and make the events of those that are right.

    Args:
        names: of the catalog.
        outputs: the files of the space, as this tick sees them; those that are damaged are `missing` in it afterwards.
        space: which must be what the files hold.
        candidates: partitions and their fresh files, by partition key; those whose source version is on record count.
        catalogued: what is on record.
        room: events that this tick may still store.
    """
    found = Adoptions()
    until, left, files = time.monotonic() + _SECONDS, _BYTES, 0
    read: dict[str, Found] = {}
    try:
        with ReadBack(outputs.store, space, until) as read_back:
            for key, (partition, file) in candidates.items():
                if catalogued.observed.get(key) != partition.source_version:
                    continue
                if file.stored.size > _FILE_BYTES:
                    found.too_large += 1
                    continue
                if files >= room or file.stored.size > left or time.monotonic() > until:
                    break
                left -= file.stored.size
                files += 1
                read_back.look(partition, file.stored.size, partial(read.__setitem__, key))
    except StoreUnavailable as error:
        log.warning("%s", error)
    for key in filter(read.__contains__, candidates):
        _, file = candidates[key]
        match read[key]:
            case None:
                receipt = receipt_of_fresh(outputs, file)
                observed = catalogued.observation_ids.get(key)
                found.events.append(lineage.materialization(names, receipt, observed, adopted=True))
            case Failure() as failure:
                log.warning("%s", failure.reason)
                if failure.transient:  # else it is the source whose rows are refused
                    outputs.refuse(file, failure.reason)
                    found.damaged.append(key)
            case error:
                log.warning("%s", error)
    return found
