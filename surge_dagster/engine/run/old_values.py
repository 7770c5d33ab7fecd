"""The rows of an old file that have certain values: hashes of texts, or ids.

Values are looked up among sorted keys of eight bytes, which are sorted once. Arrow's `index_in`
would build a table of all old values for each batch of rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.sources.partition import id_keys
from surge_dagster.engine.support.text_hash import TEXT_HASH, hash_keys

NO_ROW = -1
# per row, once a value is looked up: the sorted keys and the rows that they belong to
LOOKUP_BYTES = 16
_KEYS_AT_A_TIME = 8192


class OldValues:
    """A column of an old file: strings, int64, bytes, or hashes of texts, without nulls."""

    def __init__(self, values: pa.Array) -> None:
        self.values = values
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def rows(self, new: pa.Array, likely: np.ndarray | None = None) -> np.ndarray:
        """Return a row of the old file for each new value that it has, else `NO_ROW`; int64.

        Args:
            new: values of the same type.
            likely: old rows, or `NO_ROW`, which are taken if they have the value.
        """
        old = np.full(len(new), NO_ROW, np.int64)
        if likely is not None:
            places = np.flatnonzero(likely != NO_ROW)
            self._enter(old, new, places, likely[places])
        self._look_up(old, new, np.flatnonzero(old == NO_ROW))
        return old

    def _enter(
        self, old: np.ndarray, new: pa.Array, places: np.ndarray, old_rows: np.ndarray
    ) -> None:
        """Enter those of the old rows that have the values of the new ones at these places."""
        if len(places):
            equal = pc.equal(new.take(pa.array(places)), self.values.take(pa.array(old_rows)))  # pyright: ignore[reportAttributeAccessIssue]
            is_equal = equal.to_numpy(zero_copy_only=False)
            old[places[is_equal]] = old_rows[is_equal]

    def _look_up(self, old: np.ndarray, new: pa.Array, places: np.ndarray) -> None:
        if not len(places) or not len(self.values):
            return
        if self._sorted is None:
            keys = _keys(self.values)
            order = np.argsort(keys, kind="stable")
            self._sorted = keys[order], order
        keys, order = self._sorted
        wanted = _keys(new.take(pa.array(places)))
        nearest = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        self._enter(old, new, places, order[nearest])
        # different values with equal keys
        shared = places[(keys[nearest] == wanted) & (old[places] == NO_ROW)]
        if len(shared):
            exact = pc.index_in(new.take(pa.array(shared)), value_set=self.values)  # pyright: ignore[reportAttributeAccessIssue]
            old[shared] = exact.fill_null(NO_ROW).to_numpy()


def _keys(values: pa.Array) -> np.ndarray:
    """Return a number for each value, int64; different values seldom share one."""
    if values.type == TEXT_HASH:
        return hash_keys(values)
    starts = range(0, len(values), _KEYS_AT_A_TIME)
    return np.concatenate([id_keys(values[start : start + _KEYS_AT_A_TIME]) for start in starts])
