"""Orders of documents: given ones, and mixtures: shares, rounds through each dataset, epochs that continue."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tritonpack import Mixture, MultipackDistributedBatchSampler

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
def test_epochs_continue_each_other(until):
    mixture = Mixture(DATASETS, WEIGHTS, until=until)
    counts = []
    for epoch in range(12):
        in_epoch = np.bincount(mixture(seed=5, epoch=epoch), minlength=len(mixture.lengths))
        assert (in_epoch.max() == 1) if until == "first_exhausted" else (in_epoch.min() == 1)
        counts.append(in_epoch)
    first = 0
    for number, own in enumerate(DATASETS):
        used = np.sum(counts, axis=0)[first : first + len(own)]
        first += len(own)
        assert np.ptp(used) <= 1
        assert used.mean() == pytest.approx(12 * mixture.passes[number], abs=1)
    once = 1 if until == "first_exhausted" else -1
    assert once * max(once * passes for passes in mixture.passes) == 1


def test_no_epoch_of_many_mixtures_repeats_a_document():
    random = np.random.default_rng(1)
    for seed in range(60):
        lengths = [random.integers(1, 9, random.integers(1, 8)) for _ in range(random.integers(1, 4))]
        weights = random.uniform(0.1, 3, len(lengths)).tolist()
        for epoch in range(6):
            order = Mixture(lengths, weights)(seed, epoch)
            assert len(set(order.tolist())) == len(order)
            exhausted = Mixture(lengths, weights, until="all_exhausted")(seed, epoch)
            assert set(exhausted.tolist()) == set(range(sum(map(len, lengths))))


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
        ([[1], [0]], [1, 1], "dataset 1 of the mixture: .*document 0 has length 0"),
        ([[1], []], [1, 1], "dataset 1 of the mixture: lengths is empty"),
    ],
)
def test_bad_mixtures_are_refused(lengths, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(lengths, weights)


def make(lengths, order, ranks, **options):
    return MultipackDistributedBatchSampler(
        1024, lengths, ranks, seed=3, order=order, shard=False, tail="spread", **options
    )


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_an_epoch_of_a_mixture_goes_on_with_other_ranks(until):
    mixture = Mixture(DATASETS[:2], [2, 1], until=until)
    order = mixture(seed=3, epoch=0)
    expected = Counter(order.tolist())
    assert (max(expected.values()) > 1) == (until == "all_exhausted")
    sampler = make(mixture.lengths, mixture, 2)
    whole = [document for batch in sampler for document in batch]
    assert Counter(whole[: sampler.plan.num_documents]) == expected
    seen = []
    state = None
    for ranks, batches in ((2, 6), (4, 8), (3, 10**6)):
        sampler = make(mixture.lengths, mixture, ranks)
        if state is not None:
            sampler.load_state_dict(state)
        done = 0
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
