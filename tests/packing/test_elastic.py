"""An epoch that is broken off goes on with other ranks or options: every document once, and the rest in order."""

import json
import pickle
import warnings

import numpy as np
import pytest

from tests.packing.lengths import log_normal
from tritonpack import BinDataset, CostModel, MultipackDistributedBatchSampler, PackingWarning, notices

LENGTHS = log_normal(400, mean=60, high=256)
COST = CostModel(3.0, 0.5)


@pytest.fixture(autouse=True)
def other_settings_are_intended(monkeypatch):
    monkeypatch.setattr(notices, "_said", {"other-settings": None})


def samplers(num_replicas, lengths=LENGTHS, capacity=256, seed=5, **options):
    """The samplers of all ranks, or the one that yields the batches of all ranks."""
    ranks = range(num_replicas) if options.get("shard", True) else [None]
    return [
        MultipackDistributedBatchSampler(capacity, lengths, num_replicas, rank, seed, **options) for rank in ranks
    ]


def resumed(state, num_replicas, **options):
    found = samplers(num_replicas, **options)
    for one in found:
        one.load_state_dict(json.loads(json.dumps(state)))
    return found


def train(ranks, batches=None):
    """The documents of the next batches of all ranks, and a state after them; None takes all batches."""
    iterators = [iter(one) for one in ranks]
    documents = []
    while batches is None or batches > 0:
        step = [next(iterator, None) for iterator in iterators]
        if step[0] is None:
            assert set(map(str, step)) == {"None"}, "ranks with different numbers of batches"
            break
        documents += [document for batch in step for document in batch]
        batches = None if batches is None else batches - 1
    states = [one.state_dict() for one in ranks]
    assert states == [states[0]] * len(ranks)
    return documents, states[0]


def random_options(random):
    options = {
        "capacity": int(random.choice([256, 300, 512])),
        "tail": str(random.choice(["spread", "keep"])),
        "shard": bool(random.integers(2)),
        "steps_together": int(random.choice([1, 1, 3])),
        "lookahead": float(random.choice([0.0, 0.01, 0.2])),
    }
    objective = str(random.choice(["quadratic", "linear", "cost"]))
    return options | {"objective": objective, "cost_model": COST if objective == "cost" else None}


def break_off_often(seed):
    """The documents of an epoch that is broken off a few times, and the numbers of documents of its legs."""
    random = np.random.default_rng(seed)
    lengths = log_normal(int(random.integers(60, 400)), mean=60, high=256, seed=seed)
    ranks = samplers(int(random.integers(1, 7)), lengths, **random_options(random))
    for one in ranks:
        one.set_epoch(seed)
    seen, state = train(ranks, int(random.integers(0, 8)))
    legs = [len(seen)]
    for _ in range(random.integers(1, 5)):
        try:
            ranks = resumed(state, int(random.integers(1, 7)), lengths=lengths, **random_options(random))
        except ValueError as error:
            assert "don't divide into steps" in str(error)
            continue
        assert {one.epoch for one in ranks} == {seed}
        documents, state = train(ranks, int(random.integers(0, 8)))
        seen += documents
        legs.append(len(documents))
    documents, state = train(resumed(state, 1, lengths=lengths, tail="keep"))
    assert train(resumed(state, 1, lengths=lengths, tail="keep"))[0] == []
    assert sorted(seen + documents) == list(range(len(lengths)))
    return legs


@pytest.mark.parametrize("seed", range(12))
def test_every_document_once_over_any_legs(seed):
    break_off_often(seed)


@pytest.mark.slow
def test_every_document_once_over_thousands_of_legs():
    legs = [break_off_often(seed) for seed in range(12, 400)]
    assert sum(sum(map(bool, each)) > 2 for each in legs) > 150, "few epochs were broken off several times"
