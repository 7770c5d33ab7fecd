"""The vectors of a derived space computed again from its parent, for verification."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import convert, cut
from surge_dagster.engine.derived.parent_files import parent_rows
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.opening import usable_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.store.store import Store

_DERIVE_AGAIN = "Run `surge-dagster derive` again."


class DerivedRows:
    """Computes the vectors of a derived space again and compares them bit for bit.

    It is used like `SampledRows`. Rows come file by file and in order, and all are compared.
    """

    def __init__(self, store: Store, space: Space) -> None:
        assert space.derived
        self.compared = 0
        self.seed = None
        self._store = store
        self._space = space
        self._parent = named_space(store, space.derived.parent)
        self._files = OutputState(store, self._parent.name)
        self._wrong: dict[str, str] = {}
        self._key: str | None = None
        self._vectors: Iterator[np.ndarray] = iter(())
        self._rest = np.empty((0, 0))

    def add(self, facts: FileFacts, first_row: int, texts: pa.Array, matrix: np.ndarray) -> None:
        """Compare the stored vectors (`matrix`) of consecutive rows with those of the parent."""
        key = facts.partition_key
        try:
            if first_row == 0:
                self._key = key
                self._rest = matrix[:0]
                self._vectors = self._of_parent(facts)
            if self._key != key:  # it is known to be wrong
                return
            expected = self._next(len(matrix))
        except DataError as error:
            self._report(key, error.finding)
            return
        self.compared += len(expected)
        if len(expected) != len(matrix):
            rows = first_row + len(expected)
            self._report(key, f"the parent's file has {rows:,} rows. {_DERIVE_AGAIN}")
            return
        differs = (expected.view(np.uint8) != matrix.view(np.uint8)).any(axis=1)
        if differs.any():
            row = first_row + int(np.argmax(differs))
            self._report(key, f"row {row}: its vector does not follow from {self._parent.name}.")

    def compare(self) -> None:
        """Do nothing: rows are compared as they come."""

    def wrong(self) -> dict[str, str]:
        """Return what was found since the last call: the first wrong row of each partition."""
        wrong = self._wrong
        self._wrong = {}
        return wrong

    def _report(self, key: str, finding: str) -> None:
        self._wrong[key] = finding
        self._key = None

    def _of_parent(self, facts: FileFacts) -> Iterator[np.ndarray]:
        """Yield the vectors that the file should have, a few at a time."""
        listed = self._files.files([facts.partition_key])
        if not listed:
            raise DataError(
                facts.partition_key,
                f"the parent {self._parent.name} has no file of it",
                _DERIVE_AGAIN,
            )
        [(name, found)] = listed.items()
        file = usable_file(self._store, self._parent, name, found)
        if file.facts.rows_version != facts.rows_version:
            reason = f"it was derived from earlier rows of {self._parent.name}. {_DERIVE_AGAIN}"
            raise DataError(facts.partition_key, reason, "")
        for batch in parent_rows(self._store, self._parent, file):
            yield convert(cut(matrix_of(batch), self._space), self._space)

    def _next(self, rows: int) -> np.ndarray:
        joined = self._rest
        while len(joined) < rows and (more := next(self._vectors, None)) is not None:
            joined = np.concatenate([joined, more]) if len(joined) else more
        self._rest = joined[rows:]
        return joined[:rows]
