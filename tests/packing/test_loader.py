"""dataloader: lengths, ranks, epochs, states and columns, as a training loop of one's own meets them."""

import os
import warnings
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.packing.lengths import log_normal
from tritonpack import MultipackDistributedBatchSampler, PackingCollator, PackingWarning, dataloader, notices
from tritonpack.packing import plan_epoch

TOKENS = 256
LENGTHS = log_normal(120, mean=60, high=TOKENS)
# Document i holds the token i + 1, so that a batch tells which documents it has.
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]


def make(dataset=DOCUMENTS, tokens=TOKENS, **options):
    return dataloader(dataset, tokens, **{"num_replicas": 1, "rank": 0, "seed": 0, **options})


def documents_of(batch):
    return (batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] - 1).tolist()


def one_pass(loader):
    return [documents_of(batch) for batch in loader]


def planned(epoch, *, ranks=1, rank=0, seed=0):
    plan = plan_epoch(LENGTHS, TOKENS, ranks, seed=seed, epoch=epoch, tail="spread")
    return [row.tolist() for row in plan.rows_of_rank(rank)]


def test_each_pass_is_the_next_epoch_without_a_warning(monkeypatch):
    monkeypatch.setattr(notices, "_said", {"unpatched-model": None})
    loader = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes = []
        for epoch in range(3):
            assert len(loader) == len(planned(max(epoch - 1, 0))), "the epoch of the latest pass"
            passes.append(one_pass(loader))
            assert (loader.epoch, len(loader)) == (epoch, len(passes[-1]))
    assert passes == [planned(epoch) for epoch in range(3)]
    assert passes[0] != passes[1]
    assert all(sorted(chain.from_iterable(rows)) == list(range(120)) for rows in passes), "every document, each time"


def test_a_pass_that_is_broken_off_ends_its_epoch():
    loader = make()
    next(iter(loader))
    assert one_pass(loader) == planned(1)


def test_set_epoch_chooses_the_next_pass():
    loader = make()
    one_pass(loader)
    loader.set_epoch(0)
    assert one_pass(loader) == planned(0)
    assert one_pass(loader) == planned(1)
    with pytest.raises(ValueError, match="epoch must be"):
        loader.set_epoch(-1)


def test_set_epoch_of_the_batch_sampler_chooses_the_next_pass():
    """As loops for DistributedSampler and Lightning call it, which also makes an iterator that it doesn't use."""
    loader = make()
    for epoch in (0, 1, 5, 2):
        iter(loader)
        loader.batch_sampler.set_epoch(epoch)
        assert one_pass(loader) == planned(epoch)
    assert one_pass(loader) == planned(3)
    loader.load_state_dict(loader.state_dict(2))
    loader.batch_sampler.set_epoch(3)
    assert one_pass(loader) == planned(3)[2:]
    loader.batch_sampler.set_epoch(4)
    assert one_pass(loader) == planned(4)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_take_their_rows(rank):
    loader = make(num_replicas=3, rank=rank)
    assert len(loader) == len(planned(0, ranks=3))
    assert one_pass(loader) == planned(0, ranks=3, rank=rank)


@pytest.mark.parametrize(("ranks", "filler"), [(1, ""), (2, "1 filler row repeats"), (3, "2 filler rows repeat")])
def test_print_of_one_document(ranks, filler):
    lines = str(make([{"input_ids": [5] * 3}], num_replicas=ranks)).splitlines()
    assert lines[0] == "PackedDataLoader of 1 document, 3 tokens (lengths from input_ids)"
    assert lines[1].startswith("  epoch 0: 1 step of ")
    assert lines[2:-2] == ([f"  {filler} a document in the last step"] if filler else [])


def test_seed_is_torch_s():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = make(seed=None)
    assert torch.equal(before, torch.get_rng_state()), "no random number is drawn"
    assert one_pass(loader) == planned(0, seed=5)


class TestStates:
    @pytest.mark.parametrize("workers", [pytest.param(0, id="0"), pytest.param(2, marks=pytest.mark.heavy, id="2")])
    def test_batches_that_the_loop_got_count(self, workers):
        """Workers have fetched four more by then."""
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = make(**options)
        one_pass(loader)
        for number, _ in enumerate(loader, 1):
            if number == 3:
                break
        state = loader.state_dict()
        counted = make()
        counted.set_epoch(1)
        assert state == counted.state_dict(batches_done=3) != counted.state_dict(batches_done=4)
        resumed = make(**options)
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert resumed.state_dict() == state, "before the first batch"
        assert one_pass(resumed) == planned(1)[3:]
        assert one_pass(resumed) == planned(2)

    def test_set_epoch_of_the_resumed_epoch_keeps_its_place(self):
        loader = make()
        loader.set_epoch(4)
        state = loader.state_dict(batches_done=2)
        resumed = make()
        resumed.load_state_dict(state)
        for epoch in range(resumed.epoch, 6):
            resumed.set_epoch(epoch)
            rows = one_pass(resumed)
            assert rows == planned(epoch)[2 if epoch == 4 else 0 :]
            assert resumed.state_dict() == resumed.state_dict(batches_done=len(planned(epoch)))

    def test_ranks_count_their_own_batches(self):
        loader = make(num_replicas=2, rank=0)
        iterator = iter(loader)
        next(iterator), next(iterator)
        other = make(num_replicas=2, rank=1)
        other.load_state_dict(loader.state_dict())
        assert one_pass(other) == planned(0, ranks=2, rank=1)[2:]

    def test_bring_their_seed_and_its_number_of_steps(self):
        """Epochs of another seed may need another number of steps."""
        sizes = np.random.default_rng(1).integers(1, 40, 16).tolist()
        documents = [{"input_ids": [number + 1] * size} for number, size in enumerate(sizes)]
        seeds = {len(make(documents, 60, epochs=3, seed=seed)): seed for seed in range(20)}
        assert len(seeds) > 1, "all seeds have the same number of steps"
        (steps, seed), other = max(seeds.items()), min(seeds.items())[1]
        loader, expected = (make(documents, 60, epochs=3, seed=seed) for _ in range(2))
        next(iter(loader))
        torch.manual_seed(other)
        resumed = make(documents, 60, epochs=3, seed=None)
        with pytest.raises(ValueError, match="isn't a state"):
            resumed.load_state_dict({})
        assert len(resumed) < steps
        resumed.load_state_dict(loader.state_dict())
        passes = [one_pass(resumed) for _ in range(3)]
        assert [len(rows) for rows in passes] == [steps - 1, steps, steps]
        assert passes == [one_pass(expected)[1:], one_pass(expected), one_pass(expected)]

    def test_of_other_settings_tell_what_was_trained_on(self, monkeypatch):
        monkeypatch.setattr(notices, "_said", {"unpatched-model": None})
        loader = make()
        rows = list(zip(range(3), loader, strict=False))
        resumed = make(tokens=300)
        with pytest.warns(PackingWarning, match="other-settings"):
            resumed.load_state_dict(loader.state_dict())
        tokens = sum(row["input_ids"].numel() for _, row in rows)
        text = str(resumed)
        assert f"\n  trained on before, with other settings: 3 steps of this epoch, {tokens:,} tokens\n" in text
        assert "left out: no document\n" in text
        one_pass(resumed), next(iter(resumed))
        assert "trained on before" not in str(resumed), "the next epoch"

    def test_states_of_other_data_are_refused(self):
        state = make().state_dict(batches_done=1)
        other = make(seed=1)
        with pytest.raises(ValueError, match="seed was 0 and is 1"):
            other.load_state_dict(state)
        assert one_pass(other) == planned(0, seed=1)
        with pytest.raises(ValueError, match=r"batches_done must be an integer from 0 to .*, the number of steps"):
            other.state_dict(batches_done=10**6)


class TestLengths:
    def test_of_a_column(self):
        """A dataset that tokenizes when it is read has no tokens to measure."""
        datasets = pytest.importorskip("datasets")
        raw = datasets.Dataset.from_dict({"text": [str(n) for n in range(120)], "length": LENGTHS.tolist()})
        lazy = raw.with_transform(
            lambda rows: {"input_ids": [DOCUMENTS[int(text)]["input_ids"] for text in rows["text"]]}
        )
        loader = make(lazy)
        assert "(lengths from the column 'length')" in str(loader)
        assert one_pass(loader) == planned(0)

    def test_of_a_wrong_column(self):
        datasets = pytest.importorskip("datasets")
        wrong = [{**document, "length": 1} for document in DOCUMENTS]
        with pytest.raises(ValueError, match=f"document 0 has {LENGTHS[0]} tokens, but 1 by the column 'length'"):
            make(datasets.Dataset.from_list(wrong))
        loader = make(datasets.Dataset.from_list(wrong), drop_columns=("length",))
        assert one_pass(loader) == planned(0)
        floats = [{**document, "lengths": 1.5} for document in DOCUMENTS]
        with pytest.raises(ValueError, match=r"the column 'lengths' must hold the number.*drop_columns=\('lengths',\)"):
            make(datasets.Dataset.from_list(floats))

    def test_given(self):
        assert one_pass(make(lengths=LENGTHS)) == planned(0)
        with pytest.raises(ValueError, match="3 lengths for a dataset of 120 documents"):
            make(lengths=[1, 2, 3])
        changed = LENGTHS.copy()
        changed[-1] += 1
        with pytest.raises(ValueError, match=r"document 119 has .* tokens, but .* by the argument lengths"):
            one_pass(make(lengths=changed, tokens=TOKENS + 1))

    def test_of_a_dataset_with_lengths_in_its_documents(self):
        documents = [{**document, "length": 7, "lengths": 8} for document in DOCUMENTS]
        assert one_pass(make(documents)) == planned(0)

    def test_too_long(self):
        long = [{"input_ids": [1] * 300}, *DOCUMENTS[1:]]
        with pytest.raises(ValueError, match=r"1 of 120 documents.*300 tokens\).*'drop'.*max_document_length=256"):
            make(long)
        dropping = make(long, overlong="drop")
        assert sorted(chain.from_iterable(one_pass(dropping))) == list(range(1, 120))
        assert "1 document longer than the capacity dropped: 300 tokens lost" in str(dropping)
        cutting = make(long, max_document_length=50)
        assert max(int(batch["max_length_q"]) for batch in cutting) == 50
        assert sum(batch["input_ids"].numel() for batch in cutting) == np.minimum([300, *LENGTHS[1:]], 50).sum()
        assert f"{sum([300, *LENGTHS[1:]]) - np.minimum([300, *LENGTHS[1:]], 50).sum():,} tokens cut off" in str(
            cutting
        )


class TestColumns:
    def test_that_cannot_be_packed_are_named_with_the_remedy(self):
        documents = [{**document, "text": "", "pixel_values": [1.0]} for document in DOCUMENTS]
        with pytest.raises(ValueError, match=r"'pixel_values', 'text'.*drop_columns=\('pixel_values', 'text'\)"):
            make(documents)
        loader = make(documents, drop_columns=("pixel_values", "text"))
        assert one_pass(loader) == planned(0)
        assert str(loader).endswith("columns: input_ids; left out: pixel_values, text")

    def test_that_are_packed(self):
        documents = [
            {**document, "completion_mask": [0, *[1] * (len(document["input_ids"]) - 1)], "bbox": [[1, 2]] * length}
            for document, length in zip(DOCUMENTS, LENGTHS.tolist(), strict=True)
        ]
        batch = next(iter(make(documents, per_token=("bbox",))))
        assert batch["bbox"].shape == (1, batch["input_ids"].shape[1], 2)
        assert {"completion_mask", "labels"} <= set(batch)

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ({"input_ids": [-2] * int(LENGTHS[37])}, "document 37 has -2 at position 0"),
            ({"completion_mask": [1]}, "document 37 has .* input_ids but 1 completion_mask"),
            ({"bbox": [[1]] * int(LENGTHS[37])}, r"document 37 and integers of shape \(2,\) in document \d+;"),
            ({"label": [1, 1]}, r"shape \(2,\) in document 37 and integers of shape \(\) in document \d+;"),
            ({"token_type_ids": [0] * int(LENGTHS[37])}, r"document 37 has 'token_type_ids' and document \d+ hasn't"),
        ],
    )
    def test_errors_name_the_document_of_the_dataset(self, column, message):
        documents = [
            {**document, "bbox": [[1, 2]] * length, "label": 0}
            for document, length in zip(DOCUMENTS, LENGTHS.tolist(), strict=True)
        ]
        documents[37] |= column
        order = np.array([5, 37, *range(5), *range(6, 37), *range(38, 120)])  # document 37 isn't the first of its row
        with pytest.raises(ValueError, match=message):
            list(make(documents, tokens=4096, order=order, per_token=("bbox",), labels="documents"))

    def test_labels_of_documents(self):
        documents = [{**document, "label": number % 3} for number, document in enumerate(DOCUMENTS)]
        batch = next(iter(make(documents, labels="documents")))
        assert batch["labels"].tolist() == [number % 3 for number in documents_of(batch)]

    def test_dropped_ones_must_exist(self):
        with pytest.raises(ValueError, match="drop_columns names 'txt', but the first document has the columns input_"):
            make(drop_columns=("txt",))
        with pytest.raises(ValueError, match="drop_columns must be a collection"):
            make(drop_columns="text")

    def test_padded_rows_stay_within_the_tokens(self):
        loader = make(pad_to_multiple_of=64, pad_token_id=0)
        assert {batch["input_ids"].shape[1] % 64 for batch in loader} == {0}
        assert max(batch["input_ids"].shape[1] for batch in loader) <= TOKENS
        with pytest.raises(ValueError, match="can't be padded to multiples of 100"):
            make(pad_to_multiple_of=100, pad_token_id=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, "batch_size can't be passed: tokens decides"),
        ({"collate_fn": 5}, "collate_fn must be a function of a list of examples; got 5"),
        ({"collate_fn": PackingCollator()}, "is what dataloader makes itself.*pass its options"),
        ({"collate_fn": list, "pad_token_id": 0}, "pad_token_id is an option of PackingCollator, in whose place"),
        ({"num_wokers": 4}, "there is no option 'num_wokers'.*num_workers"),
        ({"objective": "tokens"}, "objective is what ranks get equal shares of.*pass labels='tokens'"),
        ({"labels": "linear"}, "labels must be one of 'causal', 'tokens', 'documents'"),
        ({"overlong": "none"}, "overlong must be one of 'error', 'drop'; got 'none'"),
        ({"overlong": "split"}, "no overlong='split'.*pass max_document_length; .* pack_dataset"),
        ({"overlong": "truncate"}, "no overlong='truncate'. To train on the first tokens .* pass max_document_length"),
        ({"tokens": 1, "overlong": "drop", "dataset": [{"input_ids": [1, 2]}]}, "or pass max_document_length=1,"),
        ({"drop_columns": ("input_ids",)}, "input_ids can't be dropped"),
        ({"tokens": 0}, "tokens must be an integer from 1"),
        ({"dataset": []}, "the dataset has no document to pack"),
        ({"dataset": [{"text": "a"}]}, r"must be a mapping with 'input_ids'; got the keys \['text'\].*Tokenize"),
        ({"dataset": [[1, 2]]}, "must be a mapping with 'input_ids'; got list"),
        ({"dataset": [{"input_ids": []}]}, "document 0 is empty; every document needs at least one token"),
        ({"dataset": [{"input_ids": [1]}, {"input_ids": []}]}, "document 1 has 0"),
        ({"dataset": iter(DOCUMENTS)}, "must have a length and be indexed by document"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_refuses_several_datasets():
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(DOCUMENTS))
    with pytest.raises(ValueError, match=r"got DatasetDict\. Pass one of its datasets: dataset\['train'\]"):
        make(splits)


def test_options_reach_the_dataloader():
    generator = torch.Generator()
    loader = make(generator=generator, timeout=0, worker_init_fn=print, pin_memory=False)
    assert (loader.generator, loader.worker_init_fn, loader.pin_memory) == (generator, print, False)


def test_order_is_nearly_kept_without_shuffling():
    loader = make(shuffle=False)
    steps = {number: step for step, row in enumerate(one_pass(loader)) for number in row}
    moved = [abs(steps[number] - round(number * len(loader) / 120)) for number in range(120)]
    assert max(moved) <= 5


def test_steps_together_fill_rows_in_order():
    lengths = np.random.default_rng(0).integers(30, 256, 400).tolist()
    documents = [{"input_ids": [1] * length} for length in lengths]
    alone, together = (make(documents, shuffle=False, steps_together=steps) for steps in (None, 8))
    assert len(together) < 0.85 * len(alone)


def test_options_reach_the_sampler():
    loader = make(tail="drop", objective="linear", lookahead=0.02, steps_together=1, shuffle=False)
    expected = MultipackDistributedBatchSampler(
        TOKENS, LENGTHS, 1, 0, tail="drop", objective="linear", lookahead=0.02, shuffle=False
    )
    assert one_pass(loader) == list(expected)
    left = 120 - len(np.unique(expected.plan.items))
    assert left > 0
    assert f"{left} document" in str(loader)


def test_takes_an_order():
    backwards = np.arange(120)[::-1]
    loader = make(order=backwards)
    rows = one_pass(loader)
    assert "left out: no document of the order\n" in str(loader)
    assert sorted(chain.from_iterable(rows)) == list(range(120))
    assert np.corrcoef([np.mean(row) for row in rows], np.arange(len(rows)))[0, 1] < -0.95


class TestAccelerate:
    def prepared(self, loader, rank, ranks):
        data_loader = pytest.importorskip("accelerate.data_loader")
        return data_loader.prepare_data_loader(loader, num_processes=ranks, process_index=rank, put_on_device=False)

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_divides_the_rows_and_counts_epochs(self, ranks):
        loaders = [self.prepared(make(num_replicas=ranks, rank=rank), rank, ranks) for rank in range(ranks)]
        for epoch in range(3):
            for rank, loader in enumerate(loaders):
                assert one_pass(loader) == planned(epoch, ranks=ranks, rank=rank)
                assert len(loader) == len(planned(epoch, ranks=ranks))

    @pytest.mark.parametrize("names_epoch", [False, True])
    def test_resumes(self, names_epoch):
        source = make(num_replicas=2, rank=0)
        source.set_epoch(3)
        state = source.state_dict(batches_done=2)
        ours = make(num_replicas=2, rank=1)
        loader = self.prepared(ours, 1, 2)
        ours.load_state_dict(state)
        if names_epoch:
            loader.set_epoch(ours.epoch)
        assert one_pass(loader) == planned(3, ranks=2, rank=1)[2:]
        assert one_pass(loader) == planned(4, ranks=2, rank=1)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_resumes_at_the_end_of_an_epoch(self, ranks):
        ours = make(num_replicas=ranks, rank=0)
        loader = self.prepared(ours, 0, ranks)
        ours.set_epoch(1)
        ours.load_state_dict(ours.state_dict(batches_done=len(ours)))
        assert [one_pass(loader) for _ in range(3)] == [[], planned(2, ranks=ranks), planned(3, ranks=ranks)]
        ours.load_state_dict(ours.state_dict(batches_done=len(ours)))
        for epoch in range(3, 6):
            loader.set_epoch(epoch)
            assert one_pass(loader) == ([] if epoch == 3 else planned(epoch, ranks=ranks))

    def test_cannot_count_its_batches(self):
        ours = make(num_replicas=2, rank=0)
        next(iter(self.prepared(ours, 0, 2)))
        with pytest.raises(ValueError, match=r"weren't counted here\. Pass batches_done"):
            ours.state_dict()
        counted = make(num_replicas=2, rank=1)
        next(iter(counted))
        assert ours.state_dict(batches_done=1) == counted.state_dict()


def one_of_two_processes(rank, store):
    """Runs in each of two processes."""
    # As torchrun does. accelerate reads these, and finds the group that exists.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank + 3)
    loader = dataloader(DOCUMENTS, TOKENS)
    assert one_pass(loader) == planned(0, ranks=2, rank=rank, seed=3), "the seed of rank 0"
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    prepared = accelerate.Accelerator(cpu=True).prepare(dataloader(DOCUMENTS, TOKENS))
    for epoch in range(2):
        assert one_pass(prepared) == planned(epoch, ranks=2, rank=rank, seed=3)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    torch.multiprocessing.start_processes(
        one_of_two_processes, (str(tmp_path / "store"),), nprocs=2, start_method="fork"
    )
