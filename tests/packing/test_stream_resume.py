"""PackedStream: ranks, workers, states, accelerate. Every document is in one bin, and a resumed pass is exact."""

import json
import pickle
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tritonpack import PackingCollator, PackingWarning, pack_stream
from tritonpack.packing import PackedStream

LENGTHS = np.random.default_rng(3).integers(1, 90, 300).tolist()
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS)]
OPTIONS = {"capacity": 100, "window": 16}


def numbers_of(bins):
    return [document["input_ids"][0] - 1 for document in chain.from_iterable(bins)]


def streaming(shards=4):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(DOCUMENTS).to_iterable_dataset(num_shards=shards)


class Counting:
    """Documents with a state of their own."""

    def __init__(self):
        self.begin = self.position = 0
        self.reads = 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for self.position in range(begin + 1, len(DOCUMENTS) + 1):
            self.reads += 1
            yield DOCUMENTS[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.begin = state["position"]


SOURCES = {"list": lambda: DOCUMENTS, "function": lambda: lambda: iter(DOCUMENTS), "own state": Counting}


class TestStates:
    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"overlong": "split", "capacity": 50},
            {"overlong": "split", "capacity": 7, "window": 5},
            {"overlong": "truncate", "capacity": 30, "max_items": 2},
            {"overlong": "drop", "capacity": 60, "num_replicas": 3, "rank": 1, "divide": "documents"},
            {"overlong": "split", "capacity": 90, "num_replicas": 5, "rank": 2},
            {"overlong": "split", "capacity": 80, "num_replicas": 7, "shard": False},
            {"window": 1, "carry_threshold": 1},
            {"window": 1000},
        ],
        ids=[
            "plain",
            "split",
            "many pieces",
            "truncate",
            "documents",
            "bins",
            "all ranks",
            "window of one",
            "one window",
        ],
    )
    @pytest.mark.sampled("plain-list", "documents-own state", "bins-own state", "all ranks-list")
    def test_resumes_exactly_anywhere(self, source, options):
        options = OPTIONS | options
        make = SOURCES[source]
        stream = pack_stream(make(), **options)
        states, bins = [stream.state_dict()], []
        for packed in stream:
            bins.append(packed)
            states.append(json.loads(json.dumps(stream.state_dict())))
        assert len(bins) > 20
        for done in sorted({0, 1, 2, 3, len(bins) - 1, len(bins), *range(4, len(bins), 1 + len(bins) // 8)}):
            again = pack_stream(make(), **options)
            again.load_state_dict(states[done])
            assert again.state_dict() == states[done]
            rest = list(again)
            assert rest == bins[done:]
            assert (again.num_bins, again.num_tokens, again.report) == (len(bins), stream.num_tokens, stream.report)
            assert again.state_dict() == states[-1]
            assert list(again) == bins, "the next pass begins at the beginning"

    @pytest.mark.parametrize("broken", [70, 200])
    def test_resumes_after_reading_failed(self, broken):
        def failing():
            yield from DOCUMENTS[:broken]
            raise ConnectionError

        stream = pack_stream(failing, **OPTIONS)
        with pytest.raises(ConnectionError):
            list(stream)
        again = pack_stream(DOCUMENTS, **OPTIONS)
        again.load_state_dict(stream.state_dict())
        bins = list(pack_stream(DOCUMENTS, **OPTIONS))
        assert list(again) == bins[stream.num_bins :]
        assert 0 < stream.num_bins < len(bins)

    def test_state_of_documents_saves_reading(self):
        counting = Counting()
        stream = pack_stream(counting, **OPTIONS)
        list(islice(stream, 90))
        state = stream.state_dict()
        counting.reads = 0
        stream.load_state_dict(state)
        list(stream)
        assert counting.reads < 150

    def test_state_holds_no_documents(self):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        list(islice(stream, 50))
        assert len(json.dumps(stream.state_dict())) < 2000

    def test_datasets(self):
        bins = list(pack_stream(streaming(), **OPTIONS))
        for done in (0, 1, 40, len(bins) - 1, len(bins)):
            stream = pack_stream(streaming(), **OPTIONS)
            list(islice(stream, done))
            again = pack_stream(streaming(), **OPTIONS)
            again.load_state_dict(stream.state_dict())
            assert list(again) == bins[done:]
            assert list(again) == bins

    def test_shuffle_buffer_of_datasets(self, monkeypatch):
        """datasets' state loses the buffer, so the documents are read again."""
        monkeypatch.setattr("tritonpack.notices._said", {})

        def make():
            stream = pack_stream(streaming().shuffle(seed=3, buffer_size=64), **OPTIONS)
            stream.set_epoch(2)
            return stream

        stream = make()
        bins = list(stream)
        assert bins != list(pack_stream(streaming(), **OPTIONS))
        list(islice(stream, 70))
        again = make()
        again.load_state_dict(stream.state_dict())
        with pytest.warns(PackingWarning, match=r"stream-state: .*shuffle buffers.*read again"):
            assert list(again) == bins[70:]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"capacity": 200}, "capacity was 100 and is 200"),
            ({"window": 8, "max_items": 2}, "max_items was None and is 2; window was 16 and is 8"),
            ({"num_replicas": 2, "rank": 1}, "num_replicas was 1 and is 2; rank was 0 and is 1"),
            ({"num_replicas": 2, "shard": False}, "num_replicas was 1 and is 2; shard was True and is False"),
        ],
    )
    def test_refuses_state_of_other_options(self, change, message):
        state = pack_stream(DOCUMENTS, **OPTIONS).state_dict()
        with pytest.raises(ValueError, match=f"can't be resumed, .*: {message}"):
            pack_stream(DOCUMENTS, **OPTIONS | change).load_state_dict(state)

    def test_refuses_other_documents(self):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        list(islice(stream, 30))
        again = pack_stream([[1] * 5] * 300, **OPTIONS)
        again.load_state_dict(stream.state_dict())
        with pytest.raises(ValueError, match="the documents aren't those that the state was saved with"):
            next(iter(again))

    @pytest.mark.parametrize(
        "damage",
        [
            lambda state: None,
            lambda state: state | {"version": 1},
            lambda state: state | {"more": 1},
            lambda state: state | {"epoch": -1},
            lambda state: state | {"worker": 1},
            lambda state: state | {"settings": None},
            lambda state: state | {"place": 7},
            lambda state: state | {"place": state["place"] | {"first": -5}},
            lambda state: state | {"place": state["place"] | {"carried": [[10**9, 1, 1]]}},
            lambda state: state | {"place": state["place"] | {"waiting": [["a"]]}},
            lambda state: state | {"place": state["place"] | {"checked": 3}},
            lambda state: state | {"place": state["place"] | {"other": 3}},
            lambda state: state | {"place": state["place"] | {"document": -1}},
        ],
    )
    def test_refuses_damaged_state(self, damage):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        list(islice(stream, 30))
        state = stream.state_dict()
        with pytest.raises(ValueError, match=r"state"):
            stream.load_state_dict(damage(state))
        assert stream.state_dict() == state


class TestPasses:
    def test_each_iteration_is_a_pass(self):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        assert list(stream) == list(stream)
        assert stream.num_tokens == sum(LENGTHS)
        assert stream.capacity == 100

    def test_refuses_second_pass_over_iterator(self):
        stream = pack_stream((document for document in DOCUMENTS), **OPTIONS)
        assert len(numbers_of(stream)) == 300
        with pytest.raises(ValueError, match=r"an iterator, which an earlier pass has read\. Pass something that can"):
            list(stream)

    def test_function_is_called_for_each_pass(self):
        def read():
            yield from DOCUMENTS

        stream = pack_stream(read, **OPTIONS)
        assert list(stream) == list(stream) == list(pack_stream(DOCUMENTS, **OPTIONS))
        with pytest.raises(ValueError, match=r"the function must return an iterable of documents .* returned None"):
            list(pack_stream(lambda: None, **OPTIONS))

    def test_epoch_is_passed_on(self):
        stream = pack_stream(streaming().shuffle(seed=0, buffer_size=50), **OPTIONS)
        first = list(stream)
        stream.set_epoch(1)
        assert stream.epoch == 1
        assert list(stream) != first
        stream.set_epoch(0)
        assert list(stream) == first

    def test_epoch_of_state(self):
        stream = pack_stream(streaming().shuffle(seed=0, buffer_size=400), **OPTIONS)
        stream.set_epoch(5)
        bins = list(stream)
        state = stream.state_dict()
        again = pack_stream(streaming().shuffle(seed=0, buffer_size=400), **OPTIONS)
        again.load_state_dict(state | {"place": None})
        assert again.epoch == 5
        assert list(again) == bins
        again.load_state_dict(state)
        again.set_epoch(6)
        assert len(list(again)) > 50, "another epoch begins at its beginning"

    def test_has_no_length(self):
        with pytest.raises(TypeError):
            len(pack_stream(DOCUMENTS, **OPTIONS))
        assert isinstance(pack_stream(DOCUMENTS, **OPTIONS), (IterableDataset, PackedStream))


class TestRanks:
    @pytest.mark.parametrize("ranks", [1, 2, 7])
    def test_ranks_share_bins(self, ranks):
        streams = [pack_stream(DOCUMENTS, **OPTIONS, num_replicas=ranks, rank=rank) for rank in range(ranks)]
        shares = [list(stream) for stream in streams]
        assert len({len(share) for share in shares}) == 1, "all ranks have the same number of bins"
        assert sorted(numbers_of(chain.from_iterable(shares))) == list(range(300))
        whole = list(pack_stream(DOCUMENTS, **OPTIONS, num_replicas=ranks, shard=False))
        assert shares == [whole[rank::ranks] for rank in range(ranks)]
        assert [stream.num_bins for stream in streams] == [len(whole) // ranks] * ranks

    @pytest.mark.parametrize("source", ["list", "datasets", "datasets, one shard"])
    def test_ranks_share_documents(self, source):
        numbers = []
        for rank in range(3):
            documents = DOCUMENTS if source == "list" else streaming(3 if source == "datasets" else 1)
            stream = pack_stream(documents, **OPTIONS, num_replicas=3, rank=rank, divide="documents")
            assert (stream.num_replicas, stream.rank) == (3, rank)
            numbers.append(numbers_of(stream))
            assert len(numbers[-1]) == 100
        assert sorted(chain.from_iterable(numbers)) == list(range(300))

    def test_rank_is_from_launcher(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "2")
        expected = list(pack_stream(DOCUMENTS, **OPTIONS, num_replicas=3, rank=2))
        assert list(pack_stream(DOCUMENTS, **OPTIONS)) == expected
        assert pack_stream(DOCUMENTS, **OPTIONS, shard=False).rank is None

    def test_divided_dataset_is_not_divided_again(self, monkeypatch):
        pytest.importorskip("datasets")
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "2")
        divided = pytest.importorskip("datasets.distributed").split_dataset_by_node(streaming(3), rank=2, world_size=3)
        assert len(numbers_of(pack_stream(divided, **OPTIONS, divide="documents"))) == 100
        for options in ({}, {"shard": False}):
            with pytest.raises(ValueError, match=r"divided among ranks already.*or divide='documents'"):
                pack_stream(divided, **OPTIONS, **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_replicas": 0}, "num_replicas must be .*got 0"),
            ({"num_replicas": 3}, "num_replicas=3 doesn't say which rank this process is"),
            ({"num_replicas": 3, "rank": 3}, "rank must be an integer from 0 to 2"),
            ({"shard": 1}, "shard must be True or False"),
            ({"divide": "tokens"}, "divide must be one of 'bins', 'documents'; got 'tokens'"),
            ({"divide": "documents", "shard": False}, "shard=False yields the bins of all ranks"),
        ],
    )
    def test_refuses_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            pack_stream(DOCUMENTS, **OPTIONS, **options)


class TestBinsOfAllRanks:
    @pytest.mark.parametrize("ranks", [1, 2, 7, 64])
    def test_number_of_bins_is_multiple(self, ranks):
        stream = pack_stream(DOCUMENTS, **OPTIONS, num_replicas=ranks, shard=False)
        bins = list(stream)
        assert len(bins) % ranks == 0
        assert len(set(numbers_of(bins))) == len(numbers_of(bins)) == 300 - stream.dropped_documents
        assert stream.dropped_documents == {64: 29}.get(ranks, 0)
        whole = list(pack_stream(DOCUMENTS, **OPTIONS))
        assert bins[:100] == whole[:100]

    def test_counts_documents_that_make_no_round(self, monkeypatch):
        monkeypatch.setattr("tritonpack.notices._said", {})
        stream = pack_stream([[number] * 8 for number in range(1, 12)], 8, window=2, num_replicas=4, shard=False)
        with pytest.warns(PackingWarning, match="stream-end: 3 documents at the end of a stream .* each of 4 ranks"):
            assert len(list(stream)) == 8
        assert stream.dropped_documents == 3

    @pytest.mark.parametrize("ranks", [2, 5])
    def test_accelerate_divides_them(self, ranks):
        pytest.importorskip("accelerate")
        from accelerate.data_loader import DataLoaderShard, IterableDatasetShard, prepare_data_loader

        shares = []
        for rank in range(ranks):
            stream = pack_stream(DOCUMENTS, **OPTIONS, num_replicas=ranks, shard=False)
            loader = prepare_data_loader(
                DataLoader(stream, batch_size=1, collate_fn=list),
                num_processes=ranks,
                process_index=rank,
                put_on_device=False,
            )
            assert isinstance(loader, DataLoaderShard)
            assert isinstance(loader.dataset, IterableDatasetShard)
            shares.append(list(loader))
        assert len({len(share) for share in shares}) == 1
        assert sorted(numbers_of(chain.from_iterable(chain.from_iterable(shares)))) == list(range(300))

    def test_refuses_to_be_divided_twice(self, monkeypatch):
        pytest.importorskip("accelerate")
        from accelerate.data_loader import prepare_data_loader

        def prepare(stream):
            loader = DataLoader(stream, batch_size=1, collate_fn=list)
            return prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False)

        with pytest.raises(ValueError, match=r"bins of rank 1 only.* among 2 processes again.*Pass shard=False"):
            prepare(pack_stream(DOCUMENTS, **OPTIONS, num_replicas=2, rank=1))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="Pass shard=False"):
            prepare(pack_stream(DOCUMENTS, **OPTIONS, num_replicas=1))

    def test_refuses_to_be_dispatched(self):
        """accelerate would slice every tensor of a batch, also the boundaries of documents."""
        pytest.importorskip("accelerate")
        from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader

        loader = DataLoader(pack_stream(DOCUMENTS, **OPTIONS), batch_size=1, collate_fn=PackingCollator())
        loader = prepare_data_loader(loader, device=torch.device("cpu"), put_on_device=True)
        assert isinstance(loader, DataLoaderDispatcher)
        with pytest.raises(ValueError, match="Configure it with dispatch_batches=False"):
            next(iter(loader))


class Divided(IterableDataset):
    """Divides its documents among workers itself."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from DOCUMENTS if worker is None else DOCUMENTS[worker.id :: worker.num_workers]


class TestWorkers:
    @pytest.mark.parametrize("source", ["list", "datasets", "datasets, one shard", "torch"])
    def test_workers_share_documents(self, source):
        documents = {"list": lambda: DOCUMENTS, "torch": Divided}.get(
            source, lambda: streaming(4 if source == "datasets" else 1)
        )()
        loader = DataLoader(pack_stream(documents, **OPTIONS), batch_size=None, num_workers=2)
        assert sorted(numbers_of(loader)) == list(range(300))

    def test_ranks_and_workers(self):
        shares = [
            numbers_of(
                DataLoader(pack_stream(DOCUMENTS, **OPTIONS, num_replicas=2, rank=rank), batch_size=None, num_workers=2)
            )
            for rank in range(2)
        ]
        assert sorted(chain.from_iterable(shares)) == list(range(300))

    def test_refuses_iterator(self, monkeypatch):
        stream = pack_stream(iter(DOCUMENTS), **OPTIONS)
        monkeypatch.setattr("tritonpack.packing.stream.worker_place", lambda: (1, 2))
        with pytest.raises(ValueError, match="2 workers can't read one iterator"):
            list(stream)

    def test_epoch_reaches_workers_that_stay(self):
        stream = pack_stream(streaming().shuffle(seed=0, buffer_size=50), **OPTIONS)
        loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
        first = list(loader)
        assert list(loader) == first
        stream.set_epoch(1)
        assert list(loader) != first

    def test_refuses_state_in_another_process_than_the_workers(self):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        list(DataLoader(stream, batch_size=None, num_workers=1))
        with pytest.raises(ValueError, match=r"workers of a DataLoader read this stream.*StatefulDataLoader"):
            stream.state_dict()
        list(stream)
        stream.state_dict()

    def test_refuses_state_of_one_process_in_workers(self, monkeypatch):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        list(islice(stream, 5))
        again = pack_stream(DOCUMENTS, **OPTIONS)
        again.load_state_dict(stream.state_dict())
        monkeypatch.setattr("tritonpack.packing.stream.worker_place", lambda: (0, 2))
        with pytest.raises(ValueError, match="saved by worker 0 of 1, and this is worker 0 of 2"):
            list(again)

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("source", ["list", "datasets"])
    @pytest.mark.sampled("datasets-2")
    def test_stateful_dataloader(self, workers, source):
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

        def make():
            stream = pack_stream(DOCUMENTS if source == "list" else streaming(), **OPTIONS)
            return stateful(stream, batch_size=None, num_workers=workers)

        bins = list(make())
        assert sorted(numbers_of(bins)) == list(range(300))
        for done in (3, 90):
            loader = make()
            list(islice(loader, done))
            again = make()
            again.load_state_dict(loader.state_dict())
            assert list(again) == bins[done:]

    def test_pickle(self):
        stream = pack_stream(DOCUMENTS, **OPTIONS)
        list(islice(stream, 5))
        assert list(pickle.loads(pickle.dumps(stream))) == list(pack_stream(DOCUMENTS, **OPTIONS))


class Total(torch.nn.Module):
    """A model for Trainer that keeps the token ids of its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, input_ids, cu_seq_lens_q, **boundaries):
        self.seen.append([(number - 1).tolist() for number in input_ids[0].unique()])
        assert len(cu_seq_lens_q) == len(self.seen[-1]) + 1
        return {"loss": self.weight * 1.0}


def trainer_of(folder, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = {"max_steps": 12, "save_steps": 5, "per_device_train_batch_size": 1} | options
    return transformers.Trainer(
        Total(),
        transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True, **options),
        train_dataset=pack_stream(DOCUMENTS, **OPTIONS),
        data_collator=PackingCollator(),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unpatched-model")
def test_trainer(tmp_path):
    here = {"accelerator_config": {"dispatch_batches": False}}
    bins = [sorted(numbers_of([packed])) for packed in islice(pack_stream(DOCUMENTS, **OPTIONS), 12)]
    trainer = trainer_of(tmp_path, **here)
    trainer.train()
    assert trainer.model.seen == bins
    trainer = trainer_of(tmp_path, **here)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert trainer.model.seen == bins[5:]


@pytest.mark.filterwarnings("ignore:unpatched-model")
def test_trainer_that_dispatches_batches_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"accelerator_config=\{'dispatch_batches': False\}"):
        trainer_of(tmp_path).train()
