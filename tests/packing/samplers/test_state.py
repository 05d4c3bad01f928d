"""States of both samplers: exact resume, and damaged or foreign states that are refused without a change."""

import json
import pickle

import pytest
from torch.utils.data import RandomSampler

from tests.packing.lengths import log_normal
from tritonpack import BinDataset, MultipackBatchSampler, MultipackDistributedBatchSampler

LENGTHS = log_normal(300, mean=100, high=512)


def distributed():
    return MultipackDistributedBatchSampler(512, LENGTHS, 4, 1, 0, objective="linear", overlong="drop")


def multipack():
    return MultipackBatchSampler(RandomSampler(range(len(LENGTHS))), 2, 512, LENGTHS, bin_size=9)


SAMPLERS = {"distributed": distributed, "multipack": multipack}


def state_of(name):
    source = SAMPLERS[name]()
    source.set_epoch(3)
    return json.loads(json.dumps(source.state_dict(batches_done=2)))


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def change(**values):
    """Change entries of a state, and the batches with them."""
    return lambda state: state | values


def batches_done(state):
    return state["batches_done"] if "batches_done" in state else state["rows_done"] // 4


DAMAGED = {
    "None": (lambda state: None, "must be a mapping.*got None"),
    "a list": (lambda state: list(state.items()), "must be a mapping.*got list"),
    "empty": (lambda state: {}, "isn't a state of version . of .*: it lacks .*'epoch', .*'version'"),
    "another version": (
        lambda state: state | {"version": 99},
        "isn't a state of version . of .*: it has version 99.*with the version of tritonpack that saved it",
    ),
    "True for a version": (lambda state: state | {"version": True}, "it has version True"),
    "a float version": (lambda state: state | {"version": 1.0}, "it has version 1.0"),
    "no version": (lambda state: without(state, "version"), "it lacks 'version'"),
    "no epoch": (lambda state: without(state, "epoch"), "it lacks 'epoch'"),
    "an unknown key": (lambda state: state | {"rank": 1}, "it also has 'rank'"),
    "a negative epoch": (lambda state: state | {"epoch": -1}, "epoch must be an integer of at least 0; got -1"),
    "True for an epoch": (lambda state: state | {"epoch": True}, "epoch must be .* got True"),
    "a float epoch": (lambda state: state | {"epoch": 3.0}, "epoch must be .* got 3.0"),
    "a text epoch": (lambda state: state | {"epoch": "3"}, "epoch must be .* got '3'"),
}
DAMAGED_MULTIPACK = {
    "no batches_done": (lambda state: without(state, "batches_done"), "it lacks 'batches_done'"),
    "minus three batches": (lambda state: state | {"batches_done": -3}, r"batches_done must be .* from 0 to \d+.*-3"),
    "a million batches": (lambda state: state | {"batches_done": 10**6}, r"batches_done must be .* got 1000000"),
    "True for batches": (lambda state: state | {"batches_done": True}, "batches_done must be .* got True"),
    "half a batch": (lambda state: state | {"batches_done": 2.5}, "batches_done must be .* got 2.5"),
    "None for batches": (change(batches=None), "has other batches than when it was saved"),
    "another order": (change(batches="0" * 32), "has other batches than when it was saved"),
}
DAMAGED_DISTRIBUTED = {
    "no lengths": (lambda state: without(state, "lengths"), "it lacks 'lengths'"),
    "no setting": (lambda state: without(state, "tail"), "it lacks 'tail'"),
    "version 2": (
        lambda state: {"version": 2, "epoch": 3, "lengths": "", "legs": "[]"},
        "it has version 2. Resume with the version of tritonpack that saved it, or begin the epoch anew",
    ),
    "other lengths": (change(lengths="0" * 32), "saved with other lengths: they were those of '0+' and are"),
    "a list of lengths": (change(lengths=[3, 4]), r"with other lengths: they were those of \[3, 4\] and are"),
    "a plan of None": (change(plan=None), "another version of tritonpack or NumPy"),
    "another plan": (change(plan="0" * 32), "another version of tritonpack or NumPy, which plans other batches"),
    "another plan of other ranks": (change(plan="0" * 32, num_ranks=3), "another version of tritonpack or NumPy"),
    "minus four rows": (change(rows_done=-4), "rows_done of the state .* at least 0; got -4"),
    "True for rows": (change(rows_done=True), "rows_done of the state .* got True"),
    "a million rows": (change(rows_done=10**6), r"rows_done must be an integer from 0 to \d+, the number of rows of"),
    "another seed": (change(seed=5), "its seed was 5 and is 0. Pass that seed"),
    "False for a seed": (change(seed=False), "seed of the state must be .* got False"),
    "no ranks": (change(num_ranks=0), "the settings of the state can't be: num_ranks must be .* got 0"),
    "a text for a row": (change(tokens_per_row="512"), "can't be: tokens_per_row must be .* got '512'"),
    "short rows": (change(tokens_per_row=1), "saved with another order"),
    "an unknown tail": (change(tail="all"), "can't be: tail must be one of"),
    "a text for shuffle": (change(shuffle="no"), "can't be: shuffle must be True or False"),
    "no text for before": (change(before=None), "before must be a str; got None"),
    **{
        f"before: {text[:8]}": (change(before=text), "can't be: ")
        for text in ("abc", "[", "[1]", '{"a": 1}', "[[{}, 1]]", '[[{"tail": "drop"}, 1]]', "[" * 10**5)
    },
}
DAMAGES = [("distributed", *item) for item in (DAMAGED | DAMAGED_DISTRIBUTED).items()] + [
    ("multipack", *item) for item in (DAMAGED | DAMAGED_MULTIPACK).items()
]


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


@pytest.mark.parametrize(("name", "damage"), [pytest.param(*each[::2], id="-".join(each[:2])) for each in DAMAGES])
def test_damaged_state_is_refused_and_changes_nothing(name, damage):
    change, message = damage
    assert_refused(name, change(state_of(name)), message)


def test_refuses_state_of_the_other_class():
    assert_refused("distributed", state_of("multipack"), "it lacks 'before', .*; it also has .*'batches', 'b")
    assert_refused("multipack", state_of("distributed"), "it lacks .*'batches', 'b.*; it also has .*'rows_done'")


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
    assert batches_done(source.state_dict()) == 5
    next(iterator)
    assert batches_done(source.state_dict()) == 6
    target.load_state_dict(source.state_dict(batches_done=3))
    assert list(target) == list(SAMPLERS[name]())[3:]


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_epoch_ends_a_resume(name):
    target, other = SAMPLERS[name](), SAMPLERS[name]()
    target.load_state_dict(target.state_dict(batches_done=3))
    target.set_epoch(1)
    other.set_epoch(1)
    assert batches_done(target.state_dict()) == 0
    assert list(target) == list(other)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 6, "end"])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.fast("distributed-1-2", "distributed-6-0", "multipack-end-0")
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


@pytest.mark.parametrize("done", [-1, True, 10**6, 2.5])
@pytest.mark.parametrize("name", SAMPLERS)
def test_refuses_batches_done(name, done):
    with pytest.raises(ValueError, match="batches_done must be an integer from 0 to"):
        SAMPLERS[name]().state_dict(batches_done=done)


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
    assert batches_done(target.state_dict()) == 2
    assert list(target) == list(source)[2:]
