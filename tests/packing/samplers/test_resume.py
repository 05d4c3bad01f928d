"""States of MultipackDistributedBatchSampler: an epoch goes on exactly, also with other settings; what can't is refused
and changes nothing."""

import json
import pickle
import warnings
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.lengths import log_normal
from tritonpack import BinDataset, MultipackDistributedBatchSampler, PackingWarning, Units, dataloader, notices

LENGTHS = log_normal(300, mean=60, high=256)
REPEATABLE = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _intended(monkeypatch):
    monkeypatch.setattr(notices, "said", {"other-settings": None, "same-epoch": None, "unpatched-model": None})


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
    """The documents of the next batches of all ranks (None: of all), without those of filler rows; and a state."""
    plan, rows = ranks[0].plan, []
    for step in zip(*[list(islice(iter(one), batches)) for one in ranks], strict=True):
        assert all(step), "a rank without a document"
        rows += step
    states = [one.state_dict() for one in ranks]
    assert states == [states[0]] * len(ranks)
    rows_done = json.loads(states[0]["segments"])[-1][1]
    fillers = max(0, plan.filler_rows + rows_done - plan.num_steps * plan.num_ranks)
    return [document for row in rows[: len(rows) - fillers] for document in row], states[0]


@st.composite
def interruptions(draw):
    """Units or documents, and the settings of each part of an epoch."""
    count, rng = draw(st.integers(20, 90)), np.random.default_rng(draw(st.integers(0, 10**6)))
    lengths = log_normal(3 * count, mean=40, high=85, seed=count).reshape(count, 3)
    units = Units.of_sequences([row[: rng.integers(1, 4)].tolist() for row in lengths])
    units = Units(units.tokens, units.tokens**2) if draw(st.booleans()) else units
    part = {
        "num_replicas": [1, 2, 3, 5], "capacity": [256, 300, 1000], "tail": ["keep", "spread"],
        "objective": ["quadratic", "linear"], "epochs": [1, 2], "seed": [5, 6], "steps": [*range(5)],
        "shuffle": [True, False],
    }  # fmt: skip
    fields = {name: st.sampled_from(values) for name, values in part.items()}
    return units, draw(st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=4))


@given(interruptions())
@REPEATABLE
def test_every_document_once_over_any_parts(case):
    units, parts = case
    state, seen = None, []
    for number, part in enumerate(parts):
        options, steps = dict(part), part["steps"] if number < len(parts) - 1 else None
        del options["steps"]
        ranks = samplers(lengths=units, **options)
        for one in ranks:
            one.set_epoch(1)
            if state is not None:
                one.load_state_dict(json.loads(json.dumps(state)))
        assert ranks[0].plan.sums(units.tokens).max(initial=0) <= part["capacity"]
        length = len(ranks[0])
        found, state = train(ranks, steps)
        seen += found
        assert len(ranks[0]) == ranks[0].num_batches() == length, "counted from the beginning of the epoch"
    assert sorted(seen) == list(range(len(units)))


@given(st.integers(1, 4), st.booleans(), st.sampled_from(["keep", "spread", "drop"]), st.data())
@REPEATABLE
def test_goes_on_exactly_anywhere(ranks, shard, tail, data):
    """Also in a copy, after `set_epoch` of the same epoch, and while an older iterator goes on."""
    source, target, fresh = (samplers(ranks, shard=shard, tail=tail)[-1] for _ in range(3))
    for one in (source, target):
        one.set_epoch(3)
    every, old, iterator = list(source), iter(target), iter(source)
    next(old)
    done = [next(iterator) for _ in range(data.draw(st.integers(0, len(every))))]
    state = json.loads(json.dumps(source.state_dict()))
    target.load_state_dict(state)
    next(old)
    assert (target.epoch, target.state_dict()) == (3, state)
    target.set_epoch(3)
    copy = pickle.loads(pickle.dumps(target))
    if not shard and len(done) % ranks == 0:  # ranks that take their own batches go on alike
        parts = resumed(state, ranks, tail=tail)
        assert done + [batch for step in zip(*map(list, parts), strict=True) for batch in step] == every
    assert done + list(target) == done + list(copy) == every
    assert (len(target), list(target)) == (len(every), every), "the next pass is whole"
    target.load_state_dict(state)
    target.set_epoch(1)
    fresh.set_epoch(1)
    assert list(target) == list(fresh), "another epoch ends a resume"
    iterator = iter(fresh)
    first = next(iterator)
    fresh.set_epoch(3)
    target.set_epoch(1)
    assert [first, *iterator] == list(target), "an iterator keeps its epoch"


def test_other_ranks_and_then_the_same():
    seen, state = train(samplers(2, tail="drop"), 5)
    ranks = resumed(state, 3, tail="drop")
    more, state = train(ranks, 4)
    again = resumed(state, 3, tail="drop")
    assert again[0].state_dict() == state == ranks[0].state_dict(batches_done=9)
    assert len({*seen, *more, *train(again)[0]}) == len(LENGTHS) - ranks[0].dropped_documents < len(LENGTHS)
    with pytest.raises(ValueError, match=r"at least 5, which were done before it was resumed.*got 4"):
        ranks[0].state_dict(batches_done=4)
    (one,) = samplers(1)
    for last in resumed(one.state_dict(batches_done=len(one) - 2), 6):
        assert (list(last), len(last), last.efficiency()) == ([], len(one) - 2, 1.0), "no whole step"
    (one,) = samplers(1, tail="spread")
    seen, state = train([one], len(one) - 1)
    assert resumed(state, 30, tail="spread")[0].plan.filler_rows == 30 - (len(LENGTHS) - len(seen)) > 0
    options = {"tail": "keep", "shuffle": False}
    seen, state = train(samplers(2, **options), 5)
    rows = [np.mean(batch) for batch in resumed(state, 1, **options)[0]]
    assert np.abs(np.sort(rows) - rows).max() < 0.1 * len(LENGTHS), "the rest comes in the order of the epoch"
    assert rows[0] < sorted(set(range(len(LENGTHS))) - set(seen))[20]


def test_a_step_that_has_begun_and_rows_that_are_long_enough_now():
    seen, state = train(samplers(3, shard=False, tail="keep"), 7)
    ranks = resumed(state, 3, tail="keep")
    assert len(ranks[0]) == 3 + ranks[0].plan.num_steps
    assert sorted(seen + train(ranks)[0]) == list(range(len(LENGTHS)))
    assert sorted(chain(*chain(*ranks))) == list(range(len(LENGTHS))), "the next pass is whole"
    lengths = LENGTHS.copy()
    lengths[:40] = 300
    short, long = {"capacity": 256, "overlong": "drop"}, {"capacity": 512}
    for first, second in ((short, long), (long, short)):
        seen, state = train(samplers(2, lengths=lengths, tail="keep", **first), 5)
        rest, _ = train(resumed(state, 2, lengths=lengths, tail="keep", **second))
        assert len(set(seen + rest)) == len(seen + rest)
        assert bool(set(range(len(lengths))) - set(seen + rest)) == (second is short)


def test_seed_and_distributed_checkpoint(tmp_path):
    """DCP loads into a state of the sampler, which has no earlier settings."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    seen, state = train(samplers(2, tail="keep", seed=11), 5)
    more, state = train(resumed(state, 3, tail="keep", seed=11), 3)
    checkpoint.save({"sampler": state}, checkpoint_id=tmp_path, no_dist=True)
    (one,) = samplers(1, tail="keep", seed=None)
    found = {"sampler": one.state_dict()}
    checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    one.load_state_dict(found["sampler"])
    assert (found["sampler"], one.seed) == (state, 11)
    assert sorted(seen + more + train([one])[0]) == list(range(len(LENGTHS)))


def one_rank(**options):
    return samplers(1, **{"seed": 0, "tail": "spread", **options})[0]


def loader(**options):
    documents = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]
    return dataloader(documents, **{"tokens": 256, "seed": 0, **options})


UNITS, ON = Units(LENGTHS, LENGTHS), "goes on with other settings: "
# Settings before and after; "": the batches go on in silence; "goes on ...": a warning; other text: a refusal.
CHANGES = {
    "more epochs": (one_rank, {}, {"epochs": 3}, ""),
    "another seed of a fixed order": (one_rank, {"shuffle": False}, {"shuffle": False, "seed": 3}, ""),
    "a cut that no document needs": (loader, {}, {"max_document_length": 256}, ""),
    "seed": (one_rank, {}, {"seed": 3}, ON + "seed was 0 and is 3. "),
    "rows of a loader": (loader, {}, {"tokens": 300}, ON + "the tokens of a row was 256 and is 300. "),
    "lengths": (one_rank, {}, {"lengths": LENGTHS[::-1].copy()}, "300 documents .* Pass the same, in the same order"),
    "squares": (one_rank, {"lengths": UNITS}, {"lengths": Units(LENGTHS, LENGTHS + (LENGTHS > 1))}, "300 units with"),
    "cut": (loader, {}, {"max_document_length": 60}, "other lengths.* cut alike"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_settings(case, monkeypatch):
    make, before, after, message = CHANGES[case]
    source, target, whole = make(**before), make(**after), make(**before)
    for one in (source, whole):
        one.set_epoch(1)
    state = json.loads(json.dumps(source.state_dict(batches_done=3)))
    monkeypatch.setattr(notices, "said", {"same-epoch": None, "unpatched-model": None})
    if message and not message.startswith(ON):
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(state)
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        target.load_state_dict(state)
    said = "".join(str(each.message) for each in found if each.category is PackingWarning)
    assert f"epoch 1 {message}" in said if message else not said
    if not message:
        rest, every = ([each if make is one_rank else each["input_ids"].tolist() for each in one]
                       for one in (target, whole))  # fmt: skip
        assert rest == every[3:]


SETTINGS = {
    "capacity": 256, "num_ranks": 1, "seed": 0, "objective": "quadratic", "tail": "spread", "shuffle": True,
    "least_steps": 1,
}  # fmt: skip
NOT_OURS = "this isn't a state of version 5 of .*; got .* Resume with the version of tritonpack that saved it"
ANOTHER_VERSION = "another version of tritonpack or NumPy planned"
DAMAGES = [
    *(("version", value, NOT_OURS) for value in (99, True, ...)), ("lengths", ..., NOT_OURS), ("rank", 1, NOT_OURS),
    *(("epoch", value, "epoch must be an integer of at least 0; got") for value in (-1, True, "3")),
    ("lengths", [3, 4], "saved with other lengths: of"),
    ("plan", "0" * 32, ANOTHER_VERSION),
    *(
        ("segments", json.dumps([[{**SETTINGS, name: value}, rows]]), message)
        for name, value, rows, message in (
            ("seed", 0, -4, r"rows_done must be an integer from 0 to \d+, the number of rows of"),
            ("seed", 0, 10**6, "rows_done must be"),
            ("seed", 5, 0, ANOTHER_VERSION),
            ("seed", False, 0, "can't be read or planned: seed must be .* got False"),
            ("capacity", "512", 0, "can't be read or planned: capacity must be .* got '512'"),
            ("more", 1, 0, "can't be read or planned: they are "),
        )
    ),
    ("segments", json.dumps([[SETTINGS, 10**6], [SETTINGS, 0]]), "planned: the rows of earlier settings must be"),
    *(
        ("segments", text, "can't be read or planned: ")
        for text in (None, "abc", "[]", "[1]", '{"a": 1}', '[[{"tail": "drop"}, 1]]', "[" * 10**5)
    ),
]  # fmt: skip


def test_damaged_states_are_refused_and_change_nothing():
    source, target = one_rank(), one_rank()
    source.set_epoch(3)
    state = json.loads(json.dumps(source.state_dict(batches_done=2)))
    target.set_epoch(1)
    next(iter(target))
    before = target.state_dict()
    damaged = [({**state, key: value}, message) for key, value, message in DAMAGES]
    for given_, message in [*damaged, (None, NOT_OURS)]:
        given_ = given_ and {key: value for key, value in given_.items() if value is not ...}
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(given_)
        assert target.state_dict() == before
    rest = list(target)
    target.set_epoch(1)
    assert rest == list(target)
    for done in (-1, True, 10**6, 2.5):
        with pytest.raises(ValueError, match="batches_done must be an integer from 0 to"):
            target.state_dict(batches_done=done)


@pytest.mark.parametrize(("stop", "num_workers"), [(1, 2), (6, 0), pytest.param(6, 2, marks=pytest.mark.slow)])
def test_stateful_dataloader_resumes_after_last_batch(stop, num_workers):
    """StatefulDataLoader accounts for the batches that workers fetch ahead."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data, options = BinDataset(range(len(LENGTHS))), {"collate_fn": list, "num_workers": num_workers}
    source, target = (stateful.StatefulDataLoader(data, batch_sampler=one_rank(), **options) for _ in range(2))
    source.batch_sampler.set_epoch(2)
    every = list(source.batch_sampler)
    iterator = iter(source)
    assert [next(iterator) for _ in range(stop)] == every[:stop]
    target.load_state_dict(source.state_dict())
    assert (list(target), list(target)) == (every[stop:], every)
