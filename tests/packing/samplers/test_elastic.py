"""An epoch that is broken off goes on with other ranks or options: every document once, and the rest in order."""

import json
import warnings

import numpy as np
import pytest

from tests.packing.lengths import log_normal
from tritonpack import MultipackDistributedBatchSampler, PackingWarning, notices

LENGTHS = log_normal(400, mean=60, high=256)


@pytest.fixture(autouse=True)
def other_settings_are_intended(monkeypatch):
    monkeypatch.setattr(notices, "said", {"other-settings": None})


def samplers(num_replicas, lengths=LENGTHS, capacity=256, seed=5, **options):
    """The samplers of all ranks, or the one that yields the batches of all ranks."""
    ranks = range(num_replicas) if options.get("shard", True) else [None]
    return [MultipackDistributedBatchSampler(capacity, lengths, num_replicas, rank, seed, **options) for rank in ranks]


def resumed(state, num_replicas, **options):
    found = samplers(num_replicas, **options)
    for one in found:
        one.load_state_dict(json.loads(json.dumps(state)))
    return found


def train(ranks, batches=None):
    """The documents of the next batches of all ranks, and a state after them; None takes all batches.

    Those of filler rows are left out: they are documents of other rows.
    """
    iterators = [iter(one) for one in ranks]
    plan, documents = ranks[0].plan, []
    while batches is None or batches > 0:
        step = [next(iterator, None) for iterator in iterators]
        if step[0] is None:
            assert set(map(str, step)) == {"None"}, "ranks with different numbers of batches"
            break
        documents += [document for batch in step for document in batch]
        batches = None if batches is None else batches - 1
    states = [one.state_dict() for one in ranks]
    assert states == [states[0]] * len(ranks)
    rows_done = states[0]["rows_done"]
    fillers = max(0, plan.filler_rows + rows_done - plan.num_steps * plan.num_ranks)
    return documents[: len(documents) - fillers], states[0]


def broken_off(num_replicas, steps, **options):
    """The documents of the first steps of an epoch, and the state after them."""
    return train(samplers(num_replicas, **options), steps)


def test_the_rest_is_planned_in_the_order_of_the_epoch():
    options = {"tail": "keep", "order": np.random.default_rng(0).permutation(len(LENGTHS))}
    seen, state = broken_off(2, 5, **options)
    (whole,) = samplers(1, capacity=256, **options)
    (rest,) = resumed(state, 1, **options)
    place = np.empty(len(LENGTHS))
    order = whole.plan.items
    place[order] = np.arange(len(order))
    left = [document for document in order.tolist() if document not in seen]
    rows = [place[batch].mean() for batch in rest]
    expected = np.sort(place[left])
    assert np.abs(np.sort(rows) - rows).max() < 0.05 * len(LENGTHS), "rows move by a few places"
    assert rows[0] < expected[20]


def test_same_settings_resume_the_same_batches_also_after_legs():
    _, state = broken_off(2, 5)
    ranks = resumed(state, 3)
    iterators = [iter(one) for one in ranks]
    whole = [[next(iterator) for iterator in iterators] for _ in range(4)]
    state = ranks[0].state_dict()
    whole = list(zip(*iterators, strict=True))
    again = resumed(state, 3)
    assert again[0].state_dict() == state
    assert list(zip(*again, strict=True)) == whole
    assert [len(one) for one in again] == [len(one) for one in ranks]


def test_counts_go_on_from_the_beginning_of_the_epoch():
    _, state = broken_off(2, 5, tail="keep")
    one = resumed(state, 3, tail="keep")[1]
    assert len(one) == one.num_batches() == 5 + one.plan.num_steps
    batches = list(one)
    assert len(batches) == len(one) - 5
    assert one.state_dict() == one.state_dict(batches_done=len(one))
    assert resumed(one.state_dict(batches_done=7), 3, tail="keep")[1].state_dict() == one.state_dict(batches_done=7)
    assert list(resumed(one.state_dict(batches_done=7), 3, tail="keep")[1]) == batches[2:]
    with pytest.raises(ValueError, match=r"at least 5, the batches of this epoch from before it was resumed.*got 4"):
        one.state_dict(batches_done=4)


def test_next_pass_and_other_epochs_are_whole():
    _, state = broken_off(2, 5)
    one, fresh = resumed(state, 3)[0], samplers(3)[0]
    one.set_epoch(1)
    fresh.set_epoch(1)
    assert (len(one), list(one)) == (len(fresh), list(fresh))
    one = resumed(state, 3)[0]
    fresh.set_epoch(0)
    assert len(list(one)) == len(one) - 5
    assert (list(one), len(one)) == (list(fresh), len(fresh))


def test_dropped_documents_are_counted():
    seen, state = broken_off(2, 5)
    one = samplers(2)[0]
    assert one.dropped_documents == len(LENGTHS) - len(set(one.plan.items.tolist())) > 0
    ranks = resumed(state, 4)
    rest, _ = train(ranks)
    assert ranks[0].dropped_documents == len(LENGTHS) - len(seen) - len(rest) > 0
    assert not set(seen) & set(rest)
    assert samplers(2, tail="spread")[0].dropped_documents == 0


def test_a_rest_that_fills_no_step_is_dropped():
    (one,) = samplers(1)
    state = one.state_dict(batches_done=len(one) - 2)
    for last in resumed(state, 6):
        assert (list(last), len(last), last.efficiency()) == ([], len(one) - 2, 1.0)
        assert last.dropped_documents > 2


@pytest.mark.parametrize("tail", ["keep", "spread"])
def test_a_rest_of_fewer_documents_than_ranks(tail):
    (one,) = samplers(1, tail=tail)
    seen, state = train([one], len(one) - 1)
    ranks = resumed(state, 30, tail=tail)
    left = len(LENGTHS) - len(seen)
    assert 0 < left < 30
    assert ranks[0].plan.filler_rows == 30 - left
    rest, state = train(ranks)
    assert sorted(seen + rest) == list(range(len(LENGTHS)))
    assert ranks[0].dropped_documents == 0
    assert train(resumed(state, 4, tail=tail))[0] == []


def test_the_rest_has_as_many_steps_as_it_needs():
    options = {"tail": "keep", "epochs": 3, "capacity": 250, "lengths": log_normal(60, mean=100, high=250, seed=1)}
    plain, equal = samplers(2, **options | {"epochs": 1})[0], samplers(2, **options)[0]
    assert len(plain) < len(equal)
    seen, state = broken_off(2, 2, **options)
    ranks = resumed(state, 2, **options)
    assert len(ranks[0]) == len(equal)
    others = resumed(state, 4, **options)
    assert len(others[0]) < len(equal)
    for each in (ranks, others):
        assert sorted(seen + train(each)[0]) == list(range(60))


@pytest.mark.parametrize("shards", [(True, False), (False, True), (False, False)])
def test_state_of_sharding_sampler_and_of_another(shards):
    """accelerate's processes divide the batches of a sampler that doesn't."""
    before, after = shards
    (seen, state), whole = broken_off(3, 6 if before else 18, shard=before), train(samplers(3))[0]
    (kept,) = train(resumed(state, 3, shard=after))[:1]
    assert seen + kept == whole


def test_a_step_that_has_begun():
    seen, state = broken_off(3, 7, shard=False, tail="keep")
    ranks = resumed(state, 3, tail="keep")
    assert len(ranks[0]) == 3 + ranks[0].plan.num_steps
    assert sorted(seen + train(ranks)[0]) == list(range(len(LENGTHS)))


def test_other_row_lengths():
    lengths = LENGTHS.copy()
    lengths[:40] = 300
    short, long = {"capacity": 256, "overlong": "drop"}, {"capacity": 512, "overlong": "error"}
    for first, second in ((short, long), (long, short)):
        seen, state = broken_off(2, 5, lengths=lengths, tail="keep", **first)
        ranks = resumed(state, 2, lengths=lengths, tail="keep", **second)
        rest, _ = train(ranks)
        assert len(set(seen + rest)) == len(seen + rest)
        left_out = sorted(set(range(len(lengths))) - set(seen + rest))
        assert all(lengths[document] == 300 for document in left_out)
        assert bool(left_out) == (second is short)
        assert ranks[0].dropped_documents == 0
        assert ranks[0].report.documents == (40 if second is short else 0)


def test_seed_of_the_state():
    seen, state = broken_off(2, 5, tail="keep", seed=11)
    one = resumed(state, 1, tail="keep", seed=None)[0]
    assert one.seed == 11
    assert "seed=11" in repr(one)
    assert sorted(seen + train([one])[0]) == list(range(len(LENGTHS)))
    fresh = samplers(1, tail="keep", seed=11)[0]
    one.set_epoch(1)
    fresh.set_epoch(1)
    assert list(one) == list(fresh)
    with pytest.raises(ValueError, match=r"its seed was 11 and is 5. Pass that seed, or none"):
        resumed(state, 1, tail="keep", seed=5)


def test_warns_of_other_settings(monkeypatch):
    _, state = broken_off(2, 5)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        monkeypatch.setattr(notices, "said", {})
        resumed(state, 2)
        resumed(samplers(2)[0].state_dict(), 4)
        assert not found, "the same settings, or nothing done yet"
        resumed(state, 4, capacity=300)
    (message,) = [str(each.message) for each in found if each.category is PackingWarning]
    assert "epoch 0 goes on with other settings: num_ranks was 2 and is 4; tokens_per_row was 256 and is 300" in message


def test_distributed_checkpoint_loads_states_with_other_legs(tmp_path):
    """It loads into a state of the sampler, which has fewer legs."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    seen, state = broken_off(2, 5, tail="keep", objective="linear")
    more, state = train(resumed(state, 3, tail="keep"), 3)
    checkpoint.save({"sampler": state, "step": 8}, checkpoint_id=tmp_path, no_dist=True)
    (one,) = samplers(1, tail="keep")
    found = {"sampler": one.state_dict(), "step": 0}
    checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found == {"sampler": state, "step": 8}
    one.load_state_dict(found["sampler"])
    assert sorted(seen + more + train([one])[0]) == list(range(len(LENGTHS)))
