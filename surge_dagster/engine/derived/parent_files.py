"""The files of a space that another one is derived from: their rows, and the ranges of int8."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.opening import open_listed, usable_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.derivation import Ranges
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Found, Freshness, OutputState
from surge_dagster.engine.store.store import Store

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
