"""Batches are a function of data and seed, and leave nothing out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.train.batches.batch_order import epoch_batches, split

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, tokens=st.integers(1, 200), epoch=st.integers(0, 3))
def test_every_conversation_once_and_no_batch_too_large(
    lengths: list[int], tokens: int, epoch: int
) -> None:
    indices = [10 + i for i in range(len(lengths))]
    batches = epoch_batches(indices, lengths, tokens, 0, epoch)
    assert sorted(i for batch in batches for i in batch) == indices
    for batch in batches:
        longest = max(lengths[i - 10] for i in batch)
        assert len(batch) == 1 or longest * len(batch) <= tokens
    assert batches == epoch_batches(indices, lengths, tokens, 0, epoch)


def test_seed_and_epoch_change_the_order() -> None:
    lengths = [20] * 50
    orders = {
        str(epoch_batches(range(50), lengths, 60, seed, epoch))
        for seed in range(2)
        for epoch in range(2)
    }
    assert len(orders) == 4


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 300), share=st.floats(0.01, 1.0))
def test_a_smaller_share_is_part_of_the_whole_and_never_held_out(count: int, share: float) -> None:
    whole, part = split(count, 0.1, 1.0, 3), split(count, 0.1, share, 3)
    assert len(part.train) >= 1
    assert set(part.train) <= set(whole.train)
    np.testing.assert_array_equal(part.held_out, whole.held_out)
    assert not set(whole.train) & set(whole.held_out)
    assert len(whole.train) + len(whole.held_out) == count
