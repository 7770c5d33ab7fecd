"""The passes of a portion whose texts lie one behind the other: which texts share one, and where.

Texts are not padded to one length. What fills a pass up to a size that kernels like is a text of
its own, which no other one attends to. Short texts lie in cells of 64 tokens, several in one, where
a mask keeps them apart: kernels for texts of any length take 128 tokens for each text. On an H100
attention in cells is six times as fast for texts of 11 tokens, and as fast from some 60 tokens on.

Passes of a portion are of nearly equal size: a small last one would take as long as a larger one.
Equal portions get equal passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.inference.token_backend import longest_first

TILE = 128
CELL = 64
# Longer texts leave too much of a cell empty.
LONGEST_IN_CELLS = CELL // 3
_PADDING = -1


@dataclass(frozen=True, slots=True)
class PassShape:
    """What the kernels of a pass depend on.

    Attributes:
        tokens: of all sequences, padding included.
        longest: at least the tokens of the longest sequence.
        in_cells: as that of a `Pack`.
    """

    tokens: int
    longest: int
    in_cells: bool


@dataclass(frozen=True, slots=True)
class Pack:
    """Texts that share a pass.

    Attributes:
        sequences: the number of the text in its portion, or -1 for padding, in the order in which
            they lie.
        lengths: tokens of each, at least 1.
        in_cells: whether none of them crosses a multiple of `CELL`.
    """

    sequences: np.ndarray
    lengths: np.ndarray
    in_cells: bool

    @property
    def places(self) -> np.ndarray:
        """Of the texts among all sequences."""
        return np.flatnonzero(self.sequences != _PADDING)

    @property
    def rows(self) -> np.ndarray:
        return self.sequences[self.places]

    @property
    def tokens(self) -> int:
        """Of the texts."""
        return int(self.lengths[self.places].sum())

    @property
    def padded_tokens(self) -> int:
        """A multiple of `TILE`."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, rounded up: kernels are chosen by it."""
        return -(-int(self.lengths.max()) // TILE) * TILE

    @property
    def shape(self) -> PassShape:
        return PassShape(self.padded_tokens, self.longest, self.in_cells)

    def halves(self) -> list[Pack]:
        places = self.places
        parts = np.split(places, [len(places) // 2])
        pack = _in_cells if self.in_cells else _one_by_one
        return [pack(self.sequences[part], self.lengths[part]) for part in parts]


def pack_texts(lengths: np.ndarray, token_budget: int, *, cells: bool) -> list[Pack]:
    """Pack texts of these token lengths into passes of at most the budget, without padding.

    A text without tokens has no place in a pass. A single text over the budget gets a pass of its
    own.

    Args:
        cells: whether texts of at most `LONGEST_IN_CELLS` tokens lie in cells.
    """
    order = longest_first(lengths)
    ordered = lengths[order]
    first_short = int(np.count_nonzero(ordered > (LONGEST_IN_CELLS if cells else 0)))
    long = order[:first_short]
    short = order[first_short : np.count_nonzero(ordered)]
    shares = _shares(long, lengths[long], token_budget)
    packs = [_one_by_one(texts, lengths[texts]) for texts in shares]
    if len(short):
        # Each pass gets texts of all lengths, which fill cells better; passes differ by less than
        # the longest text.
        room = max(1, token_budget - int(lengths[short[0]]))
        passes = min(len(short), -(-int(lengths[short].sum()) // room))
        for number in range(passes):
            texts = short[number::passes]
            packs.append(_in_cells(texts, lengths[texts]))
    return packs


def _shares(texts: np.ndarray, lengths: np.ndarray, token_budget: int) -> Iterator[np.ndarray]:
    """Yield runs of texts of nearly the same number of tokens."""
    ends = np.cumsum(lengths)
    start = done = 0
    while start < len(texts):
        left = int(ends[-1]) - done
        share = -(-left // -(-left // max(1, token_budget)))
        stop = max(start + 1, int(np.searchsorted(ends, done + share, side="right")))
        yield texts[start:stop]
        start = stop
        done = int(ends[stop - 1])


def _one_by_one(texts: np.ndarray, lengths: np.ndarray) -> Pack:
    """With padding in any case: passes with and without it would be compiled apart."""
    padding = TILE - int(lengths.sum()) % TILE
    return Pack(np.append(texts, _PADDING), np.append(lengths, padding), in_cells=False)


def _in_cells(texts: np.ndarray, lengths: np.ndarray) -> Pack:
    """Fill each cell with the longest texts that fit, many equal cells at a time."""
    waiting = {int(length): texts[lengths == length] for length in np.unique(lengths)}
    sequences: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    tokens = 0
    while waiting:
        filling = list[int]()
        room = CELL
        counts = {length: len(rows) for length, rows in waiting.items()}
        while fitting := [length for length, count in counts.items() if length <= room and count]:
            filling.append(max(fitting))
            counts[filling[-1]] -= 1
            room -= filling[-1]
        cells = min(len(waiting[length]) // filling.count(length) for length in set(filling))
        columns = []
        for length in filling:
            columns.append(waiting[length][:cells])
            waiting[length] = waiting[length][cells:]
        if room:
            filling.append(room)
            columns.append(np.full(cells, _PADDING))
        sequences.append(np.stack(columns, 1).ravel())
        sizes.append(np.tile(filling, cells))
        tokens += CELL * cells
        waiting = {length: rows for length, rows in waiting.items() if len(rows)}
    if tokens % TILE:
        sequences.append(np.full(1, _PADDING))
        sizes.append(np.full(1, CELL))
    return Pack(np.concatenate(sequences), np.concatenate(sizes).astype(np.int64), in_cells=True)
