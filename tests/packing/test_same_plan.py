"""Which settings may change before a state is resumed: those that leave the plan of the epoch alone, and no others."""

import json
import warnings

import numpy as np
import pytest
from torch.utils.data import RandomSampler, SequentialSampler

from tests.packing.lengths import log_normal
from tests.packing.test_passes import DOCUMENTS, LENGTHS, one_pass
from tritonpack import (
    MultipackBatchSampler,
    MultipackDistributedBatchSampler,
    PackingWarning,
    dataloader,
    notices,
)

DONE = 3


def sampler(**options):
    options = {"tail": "spread", "seed": 0, "capacity": 256, "lengths": LENGTHS, **options}
    return MultipackDistributedBatchSampler(options.pop("capacity"), options.pop("lengths"), **options)


def loader(**options):
    return dataloader(DOCUMENTS, **{"tokens": 256, "seed": 0, **options})


def bins(**options):
    options = {
        "sampler": RandomSampler(DOCUMENTS),
        "batch_size": 2,
        "batch_max_len": 256,
        "lengths": LENGTHS,
        **options,
    }
    return MultipackBatchSampler(**{"seed": 0, **options})


def resumed(make, before, after, epoch=0):
    """The batches that are left after a state was loaded, those of the same settings, and the warning."""
    source, target = make(**before), make(**after)
    source.set_epoch(epoch)
    state = json.loads(json.dumps(source.state_dict(batches_done=DONE)))
    notices.said.pop("other-settings", None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        target.load_state_dict(state)
    said = [str(each.message) for each in found if each.category is PackingWarning]
    whole = make(**before)
    whole.set_epoch(epoch)
    rest = one_pass(target) if make is loader else list(target)
    return rest, (one_pass(whole) if make is loader else list(whole))[DONE:], "".join(said)


SAME = {
    "more epochs": (sampler, {}, {"epochs": 3}),
    "fewer epochs": (sampler, {"epochs": 3}, {}),
    "another seed of a fixed order": (sampler, {"shuffle": False}, {"shuffle": False, "seed": 3}),
    "an order that is the shuffled one": (
        sampler, {"shuffle": False}, {"order": np.arange(len(LENGTHS)), "seed": 5},
    ),
    "longer documents left out": (sampler, {}, {"overlong": "drop"}),
    "another sharding": (sampler, {"num_replicas": 1, "rank": 0}, {"num_replicas": 1, "shard": False}),
    "more epochs of a loader": (loader, {}, {"epochs": 3}),
    "how rows are loaded": (loader, {}, {"num_workers": 1, "labels": "tokens"}),
    "a cut that no document needs": (loader, {}, {"max_document_length": 250}),
    "a limit of bins that none reaches": (bins, {}, {"bin_size": 50}),
    "larger groups": (bins, {}, {"group_size": 70}),
    "another seed of a sequence": (
        bins, {"sampler": SequentialSampler(DOCUMENTS)}, {"sampler": SequentialSampler(DOCUMENTS), "seed": 3},
    ),
    "more processes": (bins, {}, {"num_replicas": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_same_plan_resumes_exactly_and_in_silence(case, epoch):
    make, before, after = SAME[case]
    rest, expected, said = resumed(make, before, after, epoch)
    assert rest == expected
    assert not said


TWO = {"num_replicas": 2, "rank": 0}
OTHER = {
    "rows": (sampler, {}, {"capacity": 300}, "tokens_per_row was 256 and is 300. "),
    "ranks": (sampler, {}, {"num_replicas": 2, "rank": 0}, "num_ranks was 1 and is 2"),
    "tail": (sampler, {}, {"tail": "drop"}, "tail was 'spread' and is 'drop'. "),
    "objective": (sampler, TWO, TWO | {"objective": "linear"}, "objective was 'quadratic' and is 'linear'"),
    "shuffle": (sampler, {}, {"shuffle": False}, "shuffle was True and is False. "),
    "rows of a loader": (loader, {}, {"tokens": 300}, "other settings: tokens_per_row was 256 and is 300. "),
}


@pytest.mark.parametrize("case", OTHER)
def test_another_plan_goes_on_and_is_named(case):
    make, before, after, message = OTHER[case]
    *_, said = resumed(make, before, after)
    assert "epoch 0 goes on with other settings: " in said
    assert message in said
    assert "least_steps" not in said


def test_epochs_that_need_more_steps_are_named():
    lengths = log_normal(30, mean=100, high=250, seed=1)
    options = {"lengths": lengths}
    short = next(epoch for epoch in range(40) if len(at(epoch, **options)) < len(sampler(**options, epochs=40)))
    state = at(short, **options).state_dict(batches_done=2)
    target = sampler(**options, epochs=40)
    notices.said.pop("other-settings", None)
    with pytest.warns(PackingWarning, match="least_steps was 1 and is"):
        target.load_state_dict(state)


def at(epoch, **options):
    found = sampler(**options)
    found.set_epoch(epoch)
    return found


REFUSED = {
    "seed": (sampler, {}, {"seed": 3}, "its seed was 0 and is 3. Pass that seed, or none"),
    "lengths": (sampler, {}, {"lengths": LENGTHS[::-1].copy()}, "Pass the same documents in the same order"),
    "seed of a loader": (loader, {}, {"seed": 3}, "its seed was 0 and is 3. Pass that seed, or none"),
    "cut": (loader, {}, {"max_document_length": 60}, "other lengths.* cut at the same length"),
    "bins per batch": (bins, {}, {"batch_size": 1}, "other batches than when it was saved"),
    "limit of bins": (bins, {}, {"bin_size": 2}, "other batches than when it was saved"),
    "smaller groups": (bins, {}, {"group_size": 7}, "other batches than when it was saved"),
    "seed of bins": (bins, {}, {"seed": 3}, "other batches than when it was saved"),
    "order of bins": (
        bins,
        {},
        {"sampler": SequentialSampler(DOCUMENTS)},
        "epoch 0 has other batches than when it was saved",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_refused_by_name(case):
    make, before, after, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        resumed(make, before, after)
