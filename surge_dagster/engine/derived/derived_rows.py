"""The vectors of a derived space computed again from its parent, for verification."""

from __future__ import annotations

from hashlib import blake2b

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

    It is used like `SampledRows`. Rows come file by file and in order. Both files are read in a
    stream, so their bytes are compared by a digest.
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
        self._digest = blake2b()

    def add(self, facts: FileFacts, first_row: int, texts: pa.Array, matrix: np.ndarray) -> None:
        """Take the stored vectors (`matrix`) of consecutive rows; the last ones are compared."""
        if first_row == 0:
            self._digest = blake2b()
        self._digest.update(np.ascontiguousarray(matrix).data)
        if first_row + len(matrix) < facts.rows:
            return
        try:
            expected = self._digest_of_parent(facts)
        except DataError as error:
            self._wrong[facts.partition_key] = error.finding
            return
        self.compared += facts.rows
        if self._digest.digest() != expected:
            finding = f"its vectors do not follow from {self._parent.name}. {_DERIVE_AGAIN}"
            self._wrong[facts.partition_key] = finding

    def compare(self) -> None:
        """Do nothing: rows are compared as they come."""

    def wrong(self) -> dict[str, str]:
        """Return what was found since the last call, by partition."""
        wrong = self._wrong
        self._wrong = {}
        return wrong

    def _digest_of_parent(self, facts: FileFacts) -> bytes:
        """Return the digest of the vectors that the file should have."""
        key = facts.partition_key
        listed = self._files.files([key])
        if not listed:
            raise DataError(key, f"the parent {self._parent.name} has no file of it", _DERIVE_AGAIN)
        [(name, found)] = listed.items()
        file = usable_file(self._store, self._parent, name, found)
        if file.facts.rows_version != facts.rows_version:
            reason = f"it was derived from earlier rows of {self._parent.name}. {_DERIVE_AGAIN}"
            raise DataError(key, reason, "")
        digest = blake2b()
        for batch in parent_rows(self._store, self._parent, file, ["embedding"]):
            vectors = convert(cut(matrix_of(batch), self._space), self._space)
            digest.update(np.ascontiguousarray(vectors).data)
        return digest.digest()
