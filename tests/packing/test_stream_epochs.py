"""PackedStream over documents with an order for each epoch: passes, workers, and states with other settings."""

import json
from itertools import islice

import pytest
from torch.utils.data import DataLoader

from tests.packing.test_passes import DOCUMENTS, Shuffled
from tests.packing.test_stream_resume import OPTIONS, numbers_of
from tritonpack import PackingWarning, notices, pack_stream
from tritonpack.packing import PackedStream

OPTIONS = {**OPTIONS, "capacity": 200}


def stream_of(documents=None, **options):
    return pack_stream(Shuffled() if documents is None else documents, **{**OPTIONS, **options})


def epoch(number):
    stream = stream_of()
    stream.set_epoch(number)
    return list(stream)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(notices, "_said", {})


def test_epoch_reaches_documents_in_workers_that_stay():
    stream = stream_of()
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    for number in range(3):
        stream.set_epoch(number)
        assert list(loader) == epoch(number)


def test_epoch_reaches_what_a_function_returns():
    stream = stream_of(lambda: Shuffled())
    for number in range(3):
        stream.set_epoch(number)
        assert list(stream) == epoch(number)


def test_epoch_of_documents_stays_if_nobody_chooses_one():
    documents = Shuffled()
    documents.set_epoch(2)
    assert list(stream_of(documents)) == epoch(2)


def test_warns_of_the_second_of_two_iterators_made_before_either_is_read():
    stream = stream_of()
    first, second = iter(stream), iter(stream)
    assert next(first) == epoch(0)[0]
    with pytest.warns(PackingWarning, match="same-epoch: a stream begins a second pass over epoch 0"):
        assert next(second) == epoch(0)[0]


def test_warns_of_a_second_pass():
    stream = stream_of()
    list(stream)
    with pytest.warns(
        PackingWarning, match=r"same-epoch: a stream begins a second pass over epoch 0.* Call set_epoch\("
    ):
        list(stream)


@pytest.mark.filterwarnings("error::tritonpack.PackingWarning")
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_the_first_worker_warns(options):
    loader = DataLoader(stream_of(), batch_size=None, **options)
    list(loader)
    with pytest.raises(PackingWarning, match="same-epoch: a stream begins a second pass over epoch 0"):
        list(loader)


@pytest.mark.filterwarnings("error::tritonpack.PackingWarning")
def test_documents_without_epochs_are_read_again_in_silence():
    stream = stream_of(DOCUMENTS)
    assert list(stream) == list(stream)


def test_a_state_between_passes_is_that_of_the_next():
    stream = stream_of()
    list(stream)
    stream.set_epoch(1)
    state = stream.state_dict()
    assert (state["epoch"], state["place"]) == (1, None)
    again = stream_of()
    again.load_state_dict(state)
    assert list(again) == epoch(1)


def test_a_state_holds_for_one_pass_of_new_workers():
    source, again = stream_of(), stream_of()
    list(islice(source, 3))
    again.load_state_dict(source.state_dict())
    loader = DataLoader(again, batch_size=None, num_workers=1)
    assert list(loader) == epoch(0)[3:]
    assert list(loader) == epoch(0)
    again.set_epoch(1)
    assert list(loader) == epoch(1)


GOES_ON = {
    "what one rank divides": ({}, {"divide": "documents"}),
    "bins of all of one rank": ({}, {"shard": False}),
    "documents that are too long later": ({}, {"overlong": "split"}),
    "documents that were left out later": ({"overlong": "drop"}, {"overlong": "truncate"}),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_settings_that_leave_the_bins_alone(case):
    before, after = GOES_ON[case]
    source, again = stream_of(**before), stream_of(**after)
    whole = list(stream_of(**before))
    list(islice(source, 5))
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert list(again) == whole[5:]
    assert again.report.policy == after.get("overlong", "error")


def test_a_policy_goes_on_where_another_one_failed():
    documents = [*DOCUMENTS[:40], {"input_ids": [1] * 300}, *DOCUMENTS[40:]]
    source, again = stream_of(documents), stream_of(documents, overlong="drop")
    bins = []
    with pytest.raises(ValueError, match="document 40 has 300 tokens"):
        bins.extend(source)
    again.load_state_dict(source.state_dict())
    assert bins
    assert sorted(numbers_of(bins) + numbers_of(again)) == list(range(len(DOCUMENTS)))


REFUSED = {
    "shard": ({"num_replicas": 2, "rank": 0}, {"num_replicas": 2, "shard": False}, "shard was True and is False. "),
    "rank": ({"num_replicas": 2, "rank": 0}, {"num_replicas": 2, "rank": 1}, "rank was 0 and is 1. "),
    "overlong": ({"capacity": 100, "overlong": "drop"}, {"capacity": 100, "overlong": "split"}, "overlong was 'drop'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_of_other_bins_are_named(case):
    before, after, message = REFUSED[case]
    source, again = stream_of(**before), stream_of(**after)
    assert isinstance(again, PackedStream)
    list(islice(source, 3))
    with pytest.raises(ValueError, match=f"have changed since it was saved: {message}"):
        again.load_state_dict(source.state_dict())
