"""Mixture: shares of tokens, rounds through each dataset, and epochs that continue each other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tritonpack import Mixture

RNG = np.random.default_rng(0)
DATASETS = [RNG.integers(1, 400, size) for size in (300, 40, 1000, 1)]
WEIGHTS = [0.5, 3, 0.125, 0.01]


def datasets_of(documents):
    """The dataset of each document."""
    return np.searchsorted(np.cumsum([len(own) for own in DATASETS]), documents, side="right")


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_every_beginning_of_an_epoch_has_the_shares(until):
    mixture = Mixture(DATASETS, WEIGHTS, until=until)
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    for epoch in range(3):
        order = mixture(seed=5, epoch=epoch)
        tokens = np.zeros((len(order), len(DATASETS)))
        tokens[np.arange(len(order)), datasets_of(order)] = mixture.lengths[order]
        seen = tokens.cumsum(0)
        # Each dataset is within a document of its share; the sum of all is within one document of each.
        slack = np.array([own.max() for own in DATASETS])
        assert (np.abs(seen - shares * seen.sum(1, keepdims=True)) <= slack + shares * slack.sum()).all()


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_epochs_continue_each_other_in_whole_rounds(until):
    mixture = Mixture(DATASETS, WEIGHTS, until=until)
    orders = [mixture(seed=5, epoch=epoch) for epoch in range(12)]
    documents = np.concatenate(orders)
    first = 0
    for number, own in enumerate(DATASETS):
        mine = documents[datasets_of(documents) == number] - first
        first += len(own)
        for start in range(0, len(mine), len(own)):
            part = mine[start : start + len(own)].tolist()
            assert len(set(part)) == len(part), "a document again before its dataset was used up"
        assert len(mine) / len(own) == pytest.approx(12 * mixture.passes[number], abs=1)
    once = 1 if until == "first_exhausted" else -1
    assert once * max(once * passes for passes in mixture.passes) == 1
    if until == "first_exhausted":
        assert max(Counter(orders[0].tolist()).values()) == 1


def test_orders_depend_on_the_seed_and_the_epoch_alone():
    one, same = Mixture(DATASETS, WEIGHTS), Mixture(DATASETS, [8 * weight for weight in WEIGHTS])
    assert (one(1, 7) == same(1, 7)).all()
    assert len({one(seed, epoch).tobytes() for seed in (0, 1) for epoch in (0, 1)}) == 4
    smallest = [order[datasets_of(order) == 1] for order in (one(0, 0), one(0, 1))]  # all of it in each epoch
    assert len(smallest[0]) == len(smallest[1]) == 40
    assert (smallest[0] != smallest[1]).any()
    still = Mixture(DATASETS, WEIGHTS, shuffle=False)(0, 0)
    for number in range(len(DATASETS)):
        assert (np.diff(still[datasets_of(still) == number]) == 1).all()


def test_weights_far_apart_are_exact():
    mixture = Mixture(
        [[1] * 10, [2**40] * 3], [1, 2.0**-38], shuffle=False
    )  # 10 tokens of one, 40 / 2**40 of the other
    # An epoch has 10 tokens of the first dataset and 10 / 2**38 of the second.
    second = [epoch for epoch in range(60) for document in mixture(0, epoch) if document >= 10]
    assert [len(mixture(0, epoch)) for epoch in (0, 1)] == [11, 10]
    assert second == [0]


def test_an_epoch_of_too_many_documents_is_refused():
    with pytest.raises(ValueError, match="at most 2,147,483,647 are planned at once"):
        Mixture([[1] * 10, [2**60] * 3], [1, 1e-9], until="all_exhausted")


@pytest.mark.parametrize(
    ("lengths", "weights", "message"),
    [
        ([], [], "lengths must be a list"),
        ([[1], [2]], [1], "2 datasets need as many weights; got 1"),
        ([[1], [2]], [1, 0], "weights must be numbers above 0; got 0"),
        ([[1], [2]], [1, float("nan")], "weights must be numbers above 0; got nan"),
        ([[1], [0]], [1, 1], "document 0 has length 0"),
        ([[1], []], [1, 1], "lengths is empty"),
    ],
)
def test_bad_mixtures_are_refused(lengths, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(lengths, weights)
