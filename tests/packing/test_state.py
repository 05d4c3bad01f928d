"""What state_dict writes is read whole and checked before anything of it is taken over."""

import json

import numpy as np
import pytest

from tests.packing.lengths import log_normal
from tritonpack import CostModel, MultipackBatchSampler, MultipackDistributedBatchSampler

LENGTHS = log_normal(300, mean=100, high=512)


def distributed():
    return MultipackDistributedBatchSampler(
        512, LENGTHS, 4, 1, objective="cost", cost_model=CostModel(2.0, 1.0), overlong="drop"
    )


def multipack():
    from torch.utils.data import RandomSampler

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


CORRUPT = {
    "none": (lambda state: None, "must be a mapping.*got None"),
    "a list": (lambda state: list(state.items()), "must be a mapping.*got list"),
    "empty": (lambda state: {}, "isn't a state of version 1 of .*: it lacks 'batches_done', 'epoch', "),
    "another version": (lambda state: state | {"version": 99}, "isn't a state of version 1 of .*: it has version 99"),
    "true for a version": (lambda state: state | {"version": True}, "it has version True"),
    "a float version": (lambda state: state | {"version": 1.0}, "it has version 1.0"),
    "no version": (lambda state: without(state, "version"), "it lacks 'version'"),
    "no epoch": (lambda state: without(state, "epoch"), "it lacks 'epoch'"),
    "no place": (lambda state: without(state, "batches_done"), "it lacks 'batches_done'"),
    "no settings": (lambda state: without(state, "settings"), "it lacks 'settings'"),
    "more": (lambda state: state | {"rank": 1}, "it also has 'rank'"),
    "a negative epoch": (lambda state: state | {"epoch": -1}, "epoch must be an integer of at least 0; got -1"),
    "true for an epoch": (lambda state: state | {"epoch": True}, "epoch must be .* got True"),
    "a float epoch": (lambda state: state | {"epoch": 3.0}, "epoch must be .* got 3.0"),
    "a text epoch": (lambda state: state | {"epoch": "3"}, "epoch must be .* got '3'"),
    "minus three batches": (lambda state: state | {"batches_done": -3}, r"batches_done must be .* from 0 to \d+.*-3"),
    "a million batches": (lambda state: state | {"batches_done": 10**6}, r"batches_done must be .* got 1000000"),
    "true for batches": (lambda state: state | {"batches_done": True}, "batches_done must be .* got True"),
    "none for batches": (lambda state: state | {"batches_done": None}, "batches_done must be .* got None"),
    "half a batch": (lambda state: state | {"batches_done": 2.5}, "batches_done must be .* got 2.5"),
    "settings as a list": (
        lambda state: state | {"settings": [1]},
        "settings of the state must be a .*got list",
    ),
    "no settings at all": (lambda state: state | {"settings": None}, "settings of the state must be a mapping"),
    "a setting changed": (setting("seed", 5), "can't be resumed.*seed was 5 and is 0"),
    "a setting more": (setting("colour", "red"), "colour was 'red' and is missing"),
    "a setting less": (
        lambda state: state | {"settings": without(state["settings"], "seed")},
        "seed was missing and is 0",
    ),
    "false for a seed": (setting("seed", False), "seed was False and is 0"),
    "other lengths": (setting("lengths", "0" * 32), "lengths was '0+' and is '"),
}


def take(name, state, message):
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


@pytest.mark.parametrize("corruption", CORRUPT)
@pytest.mark.parametrize("name", SAMPLERS)
def test_damaged_state_is_refused_and_changes_nothing(name, corruption):
    corrupt, message = CORRUPT[corruption]
    take(name, corrupt(state_of(name)), message)


@pytest.mark.parametrize("value", [None, 5, b"x", "0" * 32])
@pytest.mark.parametrize(("name", "key"), [("distributed", "plan"), ("multipack", "order")])
def test_another_digest_is_refused_and_changes_nothing(name, key, value):
    message = "another version of tritonpack|another order of documents" if value == "0" * 32 else f"{key} of the state"
    take(name, state_of(name) | {key: value}, message)


def test_true_does_not_equal_1_in_cost_model():
    state = state_of("distributed")
    state["settings"]["cost_model"]["per_square"] = True
    take("distributed", state, "cost_model was .*True.* and is ")


def test_refuses_state_of_the_other_class():
    take("distributed", state_of("multipack"), "it lacks 'plan'; it also has 'order'")


@pytest.mark.parametrize("name", SAMPLERS)
def test_resumes_from_json(name):
    target, source = SAMPLERS[name](), SAMPLERS[name]()
    source.set_epoch(3)
    target.load_state_dict(state_of(name))
    assert target.epoch == 3
    assert list(target) == list(source)[2:]
    target.load_state_dict(state_of(name) | {"batches_done": len(source)})
    assert list(target) == []


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
