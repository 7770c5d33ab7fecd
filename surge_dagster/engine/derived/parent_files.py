"""What is read of a derived space's parent: rows, the ranges of int8, and how far the derived space
is behind."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import PublishedFile, open_listed, usable_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import DerivedDtype, Ranges, Space
from surge_dagster.engine.output.freshness import Found, Freshness, OutputState
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted

log = logging.getLogger(__name__)

_BATCH_ROWS = 1024


def beside_parent(
    store: Store, parent: Space, listed: Mapping[str, Found | TransientError], derived: OutputState
) -> Iterator[tuple[PublishedFile, Freshness] | DataError | TransientError]:
    """Yield each file of the parent with the freshness of its derived file, or the error."""
    for name, found in listed.items():
        try:
            file = usable_file(store, parent, name, found)
        except (DataError, TransientError) as error:
            yield error
            continue
        freshness = derived.derived_freshness(file)
        if freshness.error is not None:
            yield freshness.error
        else:
            yield file, freshness


def parent_rows(
    store: Store, parent: Space, file: PublishedFile, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file as it was listed; errors are those of `open_listed`."""
    with open_listed(store, parent, file) as reader:
        for batch in reader.read(columns=columns, batch_rows=_BATCH_ROWS):
            if batch.num_rows:
                yield batch


def find_ranges(
    store: Store, parent: Space, wanted: Space, files: Iterable[PublishedFile]
) -> Ranges:
    """Return the smallest and largest value of each dimension.

    Files that are damaged or cannot be read now are left out; no vectors at all is a `ConfigError`.

    Args:
        wanted: the space to derive, without ranges.
    """
    least = np.full(wanted.dimension, np.inf, np.float32)
    most = np.full(wanted.dimension, -np.inf, np.float32)
    for file in files:
        try:
            for batch in parent_rows(store, parent, file, ["embedding"]):
                vectors = cut(matrix_of(batch), wanted)
                np.minimum(least, vectors.min(0), out=least)
                np.maximum(most, vectors.max(0), out=most)
        except StoreUnavailable:
            raise
        except (DataError, TransientError) as error:
            message = "int8 has its ranges without this partition, which may be clipped: %s"
            log.warning(message, error)
    if np.isinf(least).all():
        raise ConfigError(
            f"the space {parent.name} has no vectors to find the ranges of int8 in. Embed first "
            "(`surge-dagster embed`), then derive."
        )
    return tuple(least.tolist()), tuple(most.tolist())


@dataclass(slots=True)
class Lag:
    """What a derived space lacks of its parent.

    Attributes:
        space: its name; empty if the output does not have it.
        fresh: number of partitions whose file names the rows of the parent's file.
        missing: keys of partitions without a file.
        stale: keys of partitions whose file was derived from earlier rows.
        not_judged: keys of partitions with a file that cannot be read, and why.
    """

    space: str
    fresh: int = 0
    missing: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    not_judged: list[tuple[str, str]] = field(default_factory=list)

    @property
    def judged(self) -> int:
        return self.fresh + len(self.missing) + len(self.stale)

    def in_words(self) -> str:
        """Return the lag for people in a line."""
        counts = {
            "missing": len(self.missing),
            "derived from earlier rows": len(self.stale),
            "not judged, because a file cannot be read": len(self.not_judged),
        }
        total = counted(self.judged + len(self.not_judged), "partition")
        line = f"{self.fresh:,} of {total} up to date"
        for what, count in counts.items():
            if count:
                line += f", {count:,} {what}"
        return line


def find_derived(store: Store, wanted: Space) -> Space | None:
    """Return the derived space with the parent, dtype and dimension of `wanted`, if there is one.

    Its ranges may be other ones.
    """
    for space in list_spaces(store):
        if _conversion(space) == _conversion(wanted):
            return space
    return None


def _conversion(space: Space) -> tuple[str, str, int] | None:
    if space.derived is None:
        return None
    return space.derived.parent_sha256, space.dtype, space.dimension


def find_lag(store: Store, parent: Space, dtype: DerivedDtype, dimension: int | None) -> Lag:
    """Compare each file of the parent with the file that is derived from it."""
    wanted = parent.derive(dtype, dimension)
    space = find_derived(store, wanted)
    lag = Lag(space.name if space else "")
    parents = OutputState(store, parent.name).files()
    own = space or wanted
    derived = OutputState(store, own.name)
    derived.files()  # reads them concurrently from a bucket
    for judged in beside_parent(store, parent, parents, derived):
        if not isinstance(judged, tuple):
            lag.not_judged.append((judged.key or "?", str(judged)))
            continue
        file, freshness = judged
        if freshness.status == "fresh":
            lag.fresh += 1
        elif freshness.status == "stale":
            lag.stale.append(file.facts.partition_key)
        else:
            lag.missing.append(file.facts.partition_key)
    return lag
