"""Orders of documents that are given."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tritonpack import MultipackDistributedBatchSampler

RNG = np.random.default_rng(0)


def make(lengths, order, ranks, **options):
    return MultipackDistributedBatchSampler(
        1024, lengths, ranks, seed=3, order=order, shard=False, tail="spread", **options
    )


def test_an_epoch_of_an_order_with_repeated_documents_goes_on_with_other_ranks():
    lengths = RNG.integers(1, 400, 340)
    order = np.concatenate([RNG.permutation(340), RNG.integers(0, 340, 100)])
    expected = Counter(order.tolist())
    assert max(expected.values()) > 1
    seen = []
    state = None
    for ranks, batches in ((2, 6), (4, 8), (3, 10**6)):
        sampler = make(lengths, order, ranks)
        if state is not None:
            sampler.load_state_dict(state)
        for done, batch in enumerate(sampler, 1):
            seen += batch
            if done == batches:
                break
        state = sampler.state_dict()
    assert sampler.plan.filler_rows == 0
    assert Counter(seen) == expected


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_given_order_is_copied(kind):
    order = kind(range(300))
    sampler = make(np.full(300, 100), order, 2)
    order[:] = kind([0] * 300)
    assert sorted(document for batch in sampler for document in batch) == list(range(300))


def test_a_state_with_another_order_is_refused():
    lengths = RNG.integers(1, 500, 300)
    forth, back = np.arange(300), np.arange(300)[::-1]
    state = make(lengths, forth, 2).state_dict()
    with pytest.raises(ValueError, match="the state was saved with another order"):
        make(lengths, back, 2).load_state_dict(state)
