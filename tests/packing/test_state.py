"""States of both samplers: exact resume, and damaged or foreign states that are refused without a change."""

import json
import pickle

import numpy as np
import pytest
from torch.utils.data import RandomSampler

from tests.packing.lengths import log_normal
from tritonpack import BinDataset, CostModel, MultipackBatchSampler, MultipackDistributedBatchSampler

LENGTHS = log_normal(300, mean=100, high=512)


def distributed():
    return MultipackDistributedBatchSampler(
        512, LENGTHS, 4, 1, objective="cost", cost_model=CostModel(2.0, 1.0), overlong="drop"
    )


def multipack():
    return MultipackBatchSampler(RandomSampler(range(len(LENGTHS))), 2, 512, LENGTHS, bin_size=9)


SAMPLERS = {"distributed": distributed, "multipack": multipack}


def state_of(name):
    source = SAMPLERS[name]()
    source.set_epoch(3)
    return json.loads(json.dumps(source.state_dict(batches_done=2)))


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def setting(name, value):
    return lambda state: state | {"settings": state["settings"] | {name: value}}


DAMAGED = {
    "None": (lambda state: None, "must be a mapping.*got None"),
    "a list": (lambda state: list(state.items()), "must be a mapping.*got list"),
    "empty": (lambda state: {}, "isn't a state of version 1 of .*: it lacks 'batches_done', 'epoch', "),
    "another version": (lambda state: state | {"version": 99}, "isn't a state of version 1 of .*: it has version 99"),
    "True for a version": (lambda state: state | {"version": True}, "it has version True"),
    "a float version": (lambda state: state | {"version": 1.0}, "it has version 1.0"),
    "no version": (lambda state: without(state, "version"), "it lacks 'version'"),
    "no epoch": (lambda state: without(state, "epoch"), "it lacks 'epoch'"),
    "no batches_done": (lambda state: without(state, "batches_done"), "it lacks 'batches_done'"),
    "no settings": (lambda state: without(state, "settings"), "it lacks 'settings'"),
    "an unknown key": (lambda state: state | {"rank": 1}, "it also has 'rank'"),
    "a negative epoch": (lambda state: state | {"epoch": -1}, "epoch must be an integer of at least 0; got -1"),
    "True for an epoch": (lambda state: state | {"epoch": True}, "epoch must be .* got True"),
    "a float epoch": (lambda state: state | {"epoch": 3.0}, "epoch must be .* got 3.0"),
    "a text epoch": (lambda state: state | {"epoch": "3"}, "epoch must be .* got '3'"),
    "minus three batches": (lambda state: state | {"batches_done": -3}, r"batches_done must be .* from 0 to \d+.*-3"),
    "a million batches": (lambda state: state | {"batches_done": 10**6}, r"batches_done must be .* got 1000000"),
    "True for batches": (lambda state: state | {"batches_done": True}, "batches_done must be .* got True"),
    "None for batches": (lambda state: state | {"batches_done": None}, "batches_done must be .* got None"),
    "half a batch": (lambda state: state | {"batches_done": 2.5}, "batches_done must be .* got 2.5"),
    "settings as a list": (
        lambda state: state | {"settings": [1]},
        "settings of the state must be a .*got list",
    ),
    "None for settings": (lambda state: state | {"settings": None}, "settings of the state must be a mapping"),
    "a setting changed": (setting("seed", 5), "can't be resumed.*seed was 5 and is 0"),
    "an unknown setting": (setting("colour", "red"), "colour was 'red' and is missing"),
    "a missing setting": (
        lambda state: state | {"settings": without(state["settings"], "seed")},
        "seed was missing and is 0",
    ),
    "False for a seed": (setting("seed", False), "seed was False and is 0"),
    "other lengths": (setting("lengths", "0" * 32), "lengths was '0+' and is '"),
}


def assert_refused(name, state, message):
    """Loading the state raises an error and leaves the sampler unchanged."""
    target = SAMPLERS[name]()
    target.set_epoch(1)
    iterator = iter(target)
    next(iterator)
    before, first_epoch = target.state_dict(), list(SAMPLERS[name]())
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(state)
    assert target.state_dict() == before
    assert target.epoch == 1
    target.set_epoch(0)
    assert list(target) == first_epoch


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("name", SAMPLERS)
def test_damaged_state_is_refused_and_changes_nothing(name, damage):
    change, message = DAMAGED[damage]
    assert_refused(name, change(state_of(name)), message)


@pytest.mark.parametrize("value", [None, 5, b"x", "0" * 32])
@pytest.mark.parametrize(("name", "key"), [("distributed", "plan"), ("multipack", "order")])
def test_another_digest_is_refused_and_changes_nothing(name, key, value):
    message = "another version of tritonpack|another order of documents" if value == "0" * 32 else f"{key} of the state"
    assert_refused(name, state_of(name) | {key: value}, message)


def test_true_does_not_equal_1_in_cost_model():
    state = state_of("distributed")
    state["settings"]["cost_model"]["per_square"] = True
    assert_refused("distributed", state, "cost_model was .*True.* and is ")


def test_refuses_state_of_the_other_class():
    assert_refused("distributed", state_of("multipack"), "it lacks 'plan'; it also has 'order'")


@pytest.mark.parametrize("batches", [0, 1, 7, "all"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_resumes_after_any_batch(name, batches):
    source, target = SAMPLERS[name](), SAMPLERS[name]()
    source.set_epoch(3)
    every = list(source)
    iterator = iter(source)
    done = [next(iterator) for _ in range(len(every) if batches == "all" else batches)]
    state = json.loads(json.dumps(source.state_dict()))
    target.load_state_dict(state)
    assert target.epoch == 3
    assert target.state_dict() == state
    target.set_epoch(3)  # training loops do this at the start of an epoch
    copy = pickle.loads(pickle.dumps(target))
    assert done + list(target) == done + list(copy) == every
    assert len(target) == len(every)
    assert list(target) == every, "the next pass yields the whole epoch"


@pytest.mark.parametrize("name", SAMPLERS)
def test_state_counts_latest_iteration(name):
    source, target = SAMPLERS[name](), SAMPLERS[name]()
    source.load_state_dict(source.state_dict(batches_done=5))
    iterator = iter(source)
    assert source.state_dict()["batches_done"] == 5
    next(iterator)
    assert source.state_dict()["batches_done"] == 6
    target.load_state_dict(source.state_dict(batches_done=3))
    assert list(target) == list(SAMPLERS[name]())[3:]


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_epoch_ends_a_resume(name):
    target, other = SAMPLERS[name](), SAMPLERS[name]()
    target.load_state_dict(target.state_dict(batches_done=3))
    target.set_epoch(1)
    other.set_epoch(1)
    assert target.state_dict()["batches_done"] == 0
    assert list(target) == list(other)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 6, "end"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_stateful_dataloader_resumes_after_last_batch(name, stop, num_workers):
    """StatefulDataLoader accounts for the batches that workers fetch ahead."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        return stateful.StatefulDataLoader(
            BinDataset(range(len(LENGTHS))), batch_sampler=SAMPLERS[name](), collate_fn=list, num_workers=num_workers
        )

    source, target = loader(), loader()
    source.batch_sampler.set_epoch(2)
    every = list(source.batch_sampler)
    stop = len(every) if stop == "end" else stop
    iterator = iter(source)
    assert [next(iterator) for _ in range(stop)] == every[:stop]
    target.load_state_dict(source.state_dict())
    assert list(target) == every[stop:]
    assert list(target) == every


@pytest.mark.parametrize("done", [-1, True, False, 0.0, "", [], 10**6, 2.5, None.__class__])
@pytest.mark.parametrize("name", SAMPLERS)
def test_refuses_batches_done(name, done):
    with pytest.raises(ValueError, match="batches_done must be an integer from 0 to"):
        SAMPLERS[name]().state_dict(batches_done=done)


@pytest.mark.parametrize("name", SAMPLERS)
def test_numpy_integers_become_ints(name):
    source = SAMPLERS[name]()
    source.set_epoch(np.int64(3))
    assert json.loads(json.dumps(source.state_dict(batches_done=np.int32(2)))) == state_of(name)


@pytest.mark.parametrize("name", SAMPLERS)
def test_old_iterator_does_not_change_loaded_position(name):
    target, source = SAMPLERS[name](), SAMPLERS[name]()
    target.set_epoch(3)
    source.set_epoch(3)
    old = iter(target)
    next(old)
    target.load_state_dict(state_of(name))
    for _ in range(3):
        next(old)
    assert target.state_dict()["batches_done"] == 2
    assert list(target) == list(source)[2:]
