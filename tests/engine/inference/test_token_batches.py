"""Batches: every row is in one batch, of one length, within the budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.inference.token_backend import plan_batches

_LENGTHS = st.lists(st.integers(0, 300), max_size=300)


@given(_LENGTHS, st.integers(1, 2_000), st.sampled_from([0, 50, 1_000]))
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


def test_short_texts_in_a_full_chunk_are_padded_by_less_than_three_percent() -> None:
    lengths = np.random.default_rng(3).poisson(11, 8_000) + 3
    batches = plan_batches(lengths, 1_024, 50)
    assert sum(batch.tokens for batch in batches) < 1.03 * lengths.sum()
    assert len(batches) < 1.1 * lengths.sum() / 1_024
