"""pack_stream: the bins of windows, over ranks and workers; exact resume anywhere; epochs."""

import json
import pickle
from array import array
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from tests.packing import naive
from tests.packing.test_passes import Shuffled
from tests.packing.tries import REPEATABLE
from tritonpack import PackingCollator, PackingWarning, notices, pack_stream
from tritonpack.packing import fit_lengths

LENGTHS = np.random.default_rng(3).integers(1, 90, 300).tolist()
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(notices, "said", {"unpatched-model": None})


def make(documents=DOCUMENTS, **options):
    return pack_stream(documents, **{"capacity": 100, "window": 16, **options})


def numbers_of(bins):
    return [document["input_ids"][0] - 1 for document in chain.from_iterable(bins)]


def streaming(documents=DOCUMENTS, shards=4):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(documents).to_iterable_dataset(num_shards=min(shards, len(documents)))


class Counting:
    """Documents with a state of their own."""

    def __init__(self, documents=DOCUMENTS):
        self.documents, self.begin, self.position, self.reads = documents, 0, 0, 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for position in range(begin, len(self.documents)):
            self.reads, self.position = self.reads + 1, position + 1
            yield self.documents[position]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.begin = state["position"]


class Divided(IterableDataset):
    """Divides its documents among workers itself."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from DOCUMENTS if worker is None else DOCUMENTS[worker.id :: worker.num_workers]


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
@pytest.mark.parametrize("max_items", [None, 4])
def test_bins_are_those_of_pack(overlong, max_items):
    """With at most about three windows of 1,024 documents read ahead."""
    lengths, read = np.random.default_rng(0).integers(1, 600, 6000).tolist(), 0

    def rows():
        nonlocal read
        for length in lengths:
            read += 1
            yield list(range(length))

    fitted = fit_lengths(lengths, 500, overlong)
    bins = naive.windowed(fitted.lengths.tolist(), 500, max_items or 6000)
    stream, held = pack_stream(rows, 500, overlong=overlong, max_items=max_items), 0
    for number, packed in enumerate(stream):
        assert packed == [list(range(fitted.lengths[item])) for item in bins[number]]
        held += len(packed)
        assert overlong != "truncate" or read <= held + 4 * 1024
    assert (stream.num_bins, stream.num_tokens, stream.report) == (len(bins), fitted.lengths.sum(), fitted.report)
    assert stream.efficiency == fitted.lengths.sum() / (500 * len(bins))


def test_pieces_have_all_columns_and_whole_documents_are_not_copied():
    columns = {"input_ids": torch.arange(10), "labels": list(range(10)), "mask": np.ones(10, int),
               "tuple": tuple(range(10)), "weights": array("f", range(10))}  # fmt: skip
    (first,), (second,) = pack_stream([columns], 6, overlong="split")
    for name, values in columns.items():
        assert (list(first[name]), list(second[name])) == (list(values[:6]), list(values[6:]))
        assert type(first[name]) is type(values)
    document = {"input_ids": [1, 2], "source": "a book"}
    ((same,),) = pack_stream([document], 2)
    assert same is document
    empty = pack_stream([[1] * 9], 8, overlong="drop")
    assert (list(empty), empty.efficiency, empty.report.tokens_lost) == ([], 1.0, 9)


SOURCES = {"list": list, "function": lambda rows: lambda: iter(rows), "own state": Counting, "datasets": streaming}
RANKS = st.sampled_from([{}, {"num_replicas": 5, "rank": 2}, {"num_replicas": 7, "shard": False}])


@REPEATABLE
@given(
    st.sampled_from(sorted(SOURCES)), RANKS, st.sampled_from(["split", "truncate", "drop"]), st.integers(5, 100),
    st.sampled_from([1, 5, 16, 1000]), st.sampled_from([None, 2]), st.data(),
)  # fmt: skip
def test_resumes_exactly_anywhere(source, ranks, overlong, capacity, window, items, data):
    """The same bins, counts and states as of a pass that wasn't interrupted; the next pass begins at the beginning."""
    options = {"overlong": overlong, "capacity": capacity, "window": window, "max_items": items, **ranks}
    rows = DOCUMENTS[: data.draw(st.integers(1, 80))]
    stream = make(SOURCES[source](rows), **options)
    states, bins = [stream.state_dict()], []
    for packed in stream:
        bins.append(packed)
        states.append(json.loads(json.dumps(stream.state_dict())))
    assert len(json.dumps(states[-1])) < 4000 + 30 * window, "a state holds no documents"
    over = {"split": lambda length: length, "truncate": lambda length: capacity, "drop": lambda length: 0}[overlong]
    kept = [length if length <= capacity else over(length) for length in LENGTHS[: len(rows)]]
    assert sum(len(document["input_ids"]) for document in chain.from_iterable(bins)) == stream.num_tokens
    if stream.rank is None and not stream.dropped_documents:
        assert stream.num_tokens == sum(kept), "nothing is lost or cut but by the policy"
    done = data.draw(st.integers(0, len(bins)))
    again = make(SOURCES[source](rows), **options)
    again.load_state_dict(states[done])
    assert again.state_dict() == states[done]
    assert list(again) == bins[done:]
    assert (again.num_bins, again.num_tokens, again.report) == (len(bins), stream.num_tokens, stream.report)
    assert again.state_dict() == stream.state_dict(), "after the last bin"
    assert list(again) == bins


@REPEATABLE
@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 30))
def test_ranks_share_bins(ranks, count, window):
    rows, options = DOCUMENTS[:count], {"num_replicas": ranks, "window": window}
    streams = [make(rows, rank=rank, **options) for rank in range(ranks)]
    shares = [list(stream) for stream in streams]
    found = numbers_of(chain.from_iterable(shares))
    assert len(set(found)) == len(found) == count - streams[0].dropped_documents
    assert streams[0].dropped_documents < ranks, "only of documents that make no bin for each rank"
    whole = list(make(rows, shard=False, **options))
    assert len(whole) % ranks == 0, "all ranks have the same number of bins"
    assert shares == [whole[rank::ranks] for rank in range(ranks)]


# options before and after -> what the refusal says
SETTINGS = [
    ({}, {"capacity": 200}, "the tokens of a row was 100 and is 200"),
    ({}, {"window": 8, "max_items": 2}, "max_items was None and is 2; window was 16 and is 8"),
    (
        {"num_replicas": 2, "rank": 0},
        {"num_replicas": 3, "shard": False},
        "_replicas was 2 and is 3; rank was 0 and is",
    ),
    ({"capacity": 80, "overlong": "drop"}, {"capacity": 80, "overlong": "split"}, "overlong was 'drop' and"),
    ({}, {"documents": [[1] * 5] * 300}, "the documents aren't those that the state was saved with"),
    ({}, {"documents": DOCUMENTS[:30]}, "the documents aren't those that the state was saved with"),
]


@pytest.mark.parametrize(("before", "after", "message"), SETTINGS)
def test_states_of_other_settings(before, after, message):
    source, again = make(**before), make(**{**before, **after})
    list(islice(source, 30))
    state, unchanged = source.state_dict(), again.state_dict()
    with pytest.raises(ValueError, match=message):
        _ = again.load_state_dict(state), next(iter(again))
    for other in ({**state, "more": 1}, {**state, "version": 3}, None):
        with pytest.raises(ValueError, match="this isn't a state of version 5 of PackedStream"):
            source.load_state_dict(other)
    assert source.state_dict() == state
    assert message.startswith("the documents") or again.state_dict() == unchanged


# values of a state -> others
DAMAGES = [
    *({"before": value} for value in (-1, 1, float("nan"), 10**9)),
    *({"checked": value} for value in ([], {})), *({"num_bins": value} for value in (2, True, 4)),
    {"worker": -1}, {"carried": []}, {"first": None}, {"document": "x"}, {"num_tokens": None}, {"source": 0},
    {"digest": None}, {"capacity": 7},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("source", [list, Counting])
def test_damaged_states_are_refused(source, damage):
    stream, again = make(source(DOCUMENTS)), make(source(DOCUMENTS))
    list(islice(stream, 3))
    state = stream.state_dict()
    with pytest.raises(ValueError, match=r"the state is damaged.*Begin a new pass"):
        again.load_state_dict({**state, **damage})
    assert again.state_dict() == make(source(DOCUMENTS)).state_dict(), "unchanged"
    again.load_state_dict(pickle.loads(pickle.dumps(json.loads(json.dumps(state, sort_keys=True)))))
    assert again.state_dict() == state


@pytest.mark.parametrize("documents", [DOCUMENTS, lambda: iter(DOCUMENTS)])
def test_states_of_documents_with_a_state_are_not_for_others(documents):
    stream, again = make(Counting()), make(documents)
    list(islice(stream, 90))
    again.load_state_dict(stream.state_dict())
    with pytest.raises(
        ValueError, match=r"documents with load_state_dict, .* and (list|list_iterator) has none\. Pass"
    ):
        next(iter(again))


@pytest.mark.parametrize("read", [iter, lambda rows: (row for row in rows), lambda rows: chain(rows)])
def test_a_function_makes_a_new_iterator_in_each_call(read):
    rows = read(DOCUMENTS)
    stream, again = make(lambda: rows), make(lambda: read(DOCUMENTS))
    assert list(stream) == list(again) == list(again)
    with pytest.raises(ValueError, match="make a new iterator in each call; it returned <"):
        list(stream)


def test_the_epoch_has_a_range():
    stream = make()
    stream.set_epoch(2**63 - 1)
    with pytest.raises(
        ValueError, match="epoch must be an integer from 0 to 9223372036854775807; got 18446744073709551616"
    ):
        stream.set_epoch(2**64)
    assert stream.epoch == 2**63 - 1


def test_states_after_reading_failed_and_with_less_reading():
    documents, bins, counting = [*DOCUMENTS[:140], {"input_ids": [1] * 300}, *DOCUMENTS[140:]], [], Counting()
    source, again = make(documents), make(documents, overlong="drop")
    with pytest.raises(ValueError, match="document 140 has 300 tokens"):
        bins.extend(source)
    again.load_state_dict(source.state_dict())
    assert sorted(numbers_of(bins) + numbers_of(again)) == list(range(300)), "another policy goes on"
    stream = make(counting)
    list(islice(stream, 90))
    counting.reads = 0
    stream.load_state_dict(stream.state_dict())
    iter(stream)  # as Lightning makes one that it doesn't use
    list(stream)
    assert counting.reads < 150


def test_states_of_shuffle_buffers_of_datasets():
    """The state of a buffer is lost, so the documents must be read from the beginning."""
    shuffled = streaming().shuffle(seed=3, buffer_size=64)
    for source in (lambda: iter(shuffled), shuffled):
        stream, again, bins = make(source), make(source), list(make(source))
        list(islice(stream, 70))
        again.load_state_dict(stream.state_dict())
        if source is not shuffled:
            assert list(again) == bins[70:]
    with pytest.raises(ValueError, match=r"shuffle buffers.*pack_stream\(lambda: iter"):
        list(again)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("documents", [Shuffled, lambda: lambda: Shuffled()])
def test_epoch_reaches_documents_also_in_workers_that_stay(documents, workers):
    def epoch(number):
        given = Shuffled()
        given.set_epoch(number)
        return list(make(given, capacity=200))  # it stays if nobody chooses one

    stream = make(documents(), capacity=200)
    loader = DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for number in range(3):
        stream.set_epoch(number)
        assert list(loader) == epoch(number)
    if not workers:
        stream.set_epoch(3)
        assert (stream.state_dict()["epoch"], stream.state_dict()["num_bins"]) == (3, 0), "between passes"


@pytest.mark.filterwarnings("error::tritonpack.PackingWarning")
def test_the_first_worker_warns():
    loader = DataLoader(make(Shuffled(), capacity=200), batch_size=None, num_workers=2)
    list(loader)
    with pytest.raises(PackingWarning, match="same-epoch: a sampler or a stream begins a second pass over epoch 0"):
        list(loader)


def test_ranks_of_the_launcher_and_divided_datasets(monkeypatch):
    expected = list(make(num_replicas=3, rank=2))
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    divided = split(streaming(shards=3), rank=2, world_size=3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    assert list(make()) == expected
    assert len(numbers_of(make(divided, num_replicas=1))) == 100
    for options in ({}, {"shard": False}):
        with pytest.raises(ValueError, match=r"divided among ranks already.*or num_replicas=1"):
            make(divided, **options)
    stream = pack_stream([[number] * 8 for number in range(1, 12)], 8, window=2, num_replicas=4, shard=False)
    with pytest.warns(PackingWarning, match="stream-end: 3 documents at the end of a stream .* each of 4 ranks"):
        assert len(list(stream)) == 8


def test_accelerate_divides_bins_of_all_ranks_alone():
    """It would slice every tensor of a batch that it dispatches, also the boundaries of documents."""
    prepare_data_loader = pytest.importorskip("accelerate.data_loader").prepare_data_loader

    def prepare(stream, ranks=2, rank=1, **options):
        loader = DataLoader(stream, batch_size=1, collate_fn=PackingCollator() if options else list)
        options = options or {"put_on_device": False}
        return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)

    shares = [list(prepare(make(num_replicas=5, shard=False), 5, rank)) for rank in range(5)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(numbers_of(chain.from_iterable(chain.from_iterable(shares)))) == list(range(300))
    for options in ({"num_replicas": 2, "rank": 1}, {"num_replicas": 1}):
        with pytest.raises(ValueError, match=r"or divide the bins of rank [01] again\. Pass it shard=False"):
            next(iter(prepare(make(**options))))
    with pytest.raises(ValueError, match=r"slice the batches.*DataLoaderConfiguration\(dispatch_batches=False\)"):
        next(iter(prepare(make(), 1, 0, device=torch.device("cpu"), put_on_device=True)))


def test_refused_in_workers_and_for_iterators():
    stream, again = make(), make()
    list(DataLoader(stream, batch_size=None, num_workers=1))
    with pytest.raises(ValueError, match=r"workers of a DataLoader read this stream.*StatefulDataLoader"):
        stream.state_dict()
    list(islice(stream, 5))
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)
    again.load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match=r"saved by worker None, and this is worker \[0, 2\]"):
        list(DataLoader(again, batch_size=None, num_workers=2))
    with pytest.raises(ValueError, match=r"that each pass reads, or a function that returns one.*list_iterator"):
        make(iter(DOCUMENTS))


@pytest.mark.fast("<lambda>0-0", "<lambda>0-2", "Divided-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", [lambda: DOCUMENTS, Divided, streaming, lambda: streaming(shards=1)])
def test_workers_share_the_documents_and_resume(source, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    bins = list(stateful(make(source()), batch_size=None, num_workers=workers))
    assert sorted(numbers_of(bins)) == list(range(300))
    for done in (3, 90):
        loader, again = (stateful(make(source()), batch_size=None, num_workers=workers) for _ in range(2))
        list(islice(loader, done))
        again.load_state_dict(loader.state_dict())
        assert list(again) == bins[done:]
