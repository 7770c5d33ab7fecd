"""Which texts share a pass, packed or padded: every text once, no pass too large, and nothing but
whole texts in a cell."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from surge_dagster.engine.inference.packing import CELL, LONGEST_IN_CELLS, TILE, Pack, pack_texts
from surge_dagster.engine.inference.token_backend import plan_batches

_LENGTHS = st.lists(st.integers(0, 90) | st.sampled_from([0, 1, 21, 22, 64, 65, 512]), max_size=120)


def _check(pack: Pack, lengths: np.ndarray) -> None:
    assert pack.lengths.min() >= 1
    assert np.array_equal(pack.lengths[pack.places], lengths[pack.rows])
    assert pack.padded_tokens % TILE == 0
    assert pack.tokens == lengths[pack.rows].sum() <= pack.padded_tokens
    assert pack.longest >= pack.lengths.max()
    if pack.in_cells:
        ends = np.cumsum(pack.lengths)
        assert np.array_equal((ends - 1) // CELL, (ends - pack.lengths) // CELL), (
            "a text crosses the border of a cell"
        )


@example([10, 9, 1], 10, True)  # shared out evenly, the first pass would have 11
@given(_LENGTHS, st.integers(1, 1_000_000), st.booleans())
def test_every_text_with_tokens_is_in_one_pass_of_bounded_size(
    sizes: list[int], budget: int, cells: bool
) -> None:
    lengths = np.array(sizes, np.int64)
    packs = pack_texts(lengths, budget, cells=cells)
    rows = [row for pack in packs for row in pack.rows.tolist()]
    assert sorted(rows) == np.flatnonzero(lengths).tolist()
    for pack in packs:
        _check(pack, lengths)
        assert pack.in_cells == (cells and lengths[pack.rows].max() <= LONGEST_IN_CELLS)
        assert len(pack.rows) == 1 or pack.tokens <= budget, (
            "a pass above the budget would be halved"
        )


@given(_LENGTHS, st.booleans())
def test_halves_of_a_pass_hold_its_texts(sizes: list[int], cells: bool) -> None:
    lengths = np.array(sizes, np.int64)
    for pack in pack_texts(lengths, 10_000, cells=cells):
        if len(pack.rows) > 1:
            halves = pack.halves()
            assert sorted(np.concatenate([half.rows for half in halves])) == sorted(pack.rows)
            for half in halves:
                _check(half, lengths)


def test_titles_fill_cells_and_equal_portions_get_equal_passes() -> None:
    lengths = np.clip(np.random.default_rng(5).normal(11, 3, 20_000).round(), 3, 20).astype(
        np.int64
    )
    packs, again = (pack_texts(lengths, 65_536, cells=True) for _ in range(2))
    assert 1 - lengths.sum() / sum(pack.padded_tokens for pack in packs) < 0.03
    assert len({pack.padded_tokens for pack in packs}) <= 2, "passes of nearly equal size"
    assert all(
        np.array_equal(one.sequences, other.sequences)
        for one, other in zip(packs, again, strict=True)
    )


_LONG_LENGTHS = st.lists(st.integers(0, 300), max_size=300)


@given(_LONG_LENGTHS, st.integers(1, 2_000), st.sampled_from([0, 50, 1_000]))
def test_every_row_is_in_one_batch_within_the_budget_and_padding_is_bounded(
    lengths: list[int], budget: int, pass_tokens: int
) -> None:
    batches = plan_batches(np.array(lengths, np.int64), budget, pass_tokens)
    assert sorted(int(row) for batch in batches for row in batch.rows) == list(range(len(lengths)))
    for batch in batches:
        own = [lengths[row] for row in batch.rows]
        assert max(1, *own) == batch.length
        assert batch.tokens <= budget or len(batch.rows) == 1
        assert batch.tokens - sum(max(1, tokens) for tokens in own) <= pass_tokens
        assert batch.exact == (min(own) == batch.length)


def test_short_texts_in_a_full_portion_are_padded_by_under_three_percent() -> None:
    lengths = np.random.default_rng(3).poisson(11, 8_000) + 3
    batches = plan_batches(lengths, 1_024, 50)
    assert sum(batch.tokens for batch in batches) < 1.03 * lengths.sum()
    assert len(batches) < 1.1 * lengths.sum() / 1_024
