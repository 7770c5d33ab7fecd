"""A catalog that changes before every nightly run, drawn with a seed, and its expected state."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.small_catalogs import Rows, numbered_rows, partition_folder, write_partition

_CHANGED = 0.03
# so many that a bucket which goes down half-way loses enough of them to be taken for down
_FEWEST_CHANGED = 12
_APPEAR, _REMOVE = 0.005, 0.005
_MOST_ROWS = 8
_LARGE = 120  # more than a SuperBatch of the runs here may hold
_BAD: Rows = [("id-0", "a text"), ("id-1", None)]


@dataclass(slots=True)
class Moved:
    """The changes before one nightly run, by catalog key."""

    changed: set[str] = field(default_factory=set)
    # Another source version of the same rows.
    touched: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)  # changed into something that is refused
    repaired: set[str] = field(default_factory=set)

    @property
    def versions(self) -> set[str]:
        """Partitions with a source version that no run has seen yet."""
        return self.changed | self.touched | self.new | self.returned | self.spoiled | self.repaired


@dataclass(slots=True)
class MovingCatalog:
    """The folder and, beside it, what was last written there."""

    root: Path
    rows: dict[str, Rows] = field(default_factory=dict)
    removed: dict[str, Rows] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(24))
    _made: int = 0
    _night: int = 0

    @property
    def bad(self) -> set[str]:
        return {key for key, rows in self.rows.items() if rows is _BAD}

    def fill(self, partitions: int) -> Moved:
        return Moved(new={self.appear() for _ in range(partitions)})

    def move(self) -> Moved:
        """Change the catalog as in the hours before a nightly run."""
        self._night += 1
        good = sorted(self.rows.keys() - self.bad)
        count = max(_FEWEST_CHANGED, round(_CHANGED * len(good)))
        chosen = self._random.sample(good, count + 1 + max(1, round(_REMOVE * len(good))))
        moved = Moved(repaired=self.repair())
        moved.touched, moved.spoiled = set(chosen[: count // 10 + 1]), {chosen[count]}
        moved.changed, moved.removed = (
            set(chosen[count // 10 + 1 : count]),
            set(chosen[count + 1 :]),
        )
        for key in sorted(moved.changed):
            self._change(key)
        for key in sorted(moved.touched):
            self._write(key, self.rows[key])
        for key in sorted(moved.spoiled):
            self._write(key, _BAD)
        back = self._random.sample(sorted(self.removed), len(self.removed) // 4)
        for key in back:
            self._write(key, self.removed.pop(key))
        moved.returned = set(back)
        for key in sorted(moved.removed):
            self.removed[key] = self.rows.pop(key)
            shutil.rmtree(partition_folder(self.root, key))
        moved.new = {self.appear() for _ in range(max(1, round(_APPEAR * len(good))))}
        return moved

    def repair(self) -> set[str]:
        """Partitions that are refused get other rows; gives their keys."""
        repaired = self.bad
        for key in sorted(repaired):
            self._change(key)
        return repaired

    def appear(self) -> str:
        number, self._made = self._made, self._made + 1
        key = f'Köln, "{number}"' if number % 25 == 7 else f"category {number:05}"
        self._change(key, _LARGE if number % 500 == 250 else None)
        return key

    def _change(self, key: str, rows: int | None = None) -> None:
        start = self._random.randrange(1_000_000)  # texts that were not there before
        self._write(
            key, numbered_rows(key, rows or self._random.randint(1, _MOST_ROWS), start=start)
        )

    def _write(self, key: str, rows: Rows) -> None:
        self.rows[key] = rows
        write_partition(self.root, key, rows, version=f"night {self._night}")
