"""dataloader: passes, states, ranks, lengths, units and resources of datasets of all kinds, and what they do wrong."""

import os
import warnings
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.lengths import log_normal
from tests.packing.tries import REPEATABLE
from tritonpack import (
    BinDataset,
    MultipackDistributedBatchSampler,
    PackingCollator,
    dataloader,
    notices,
)
from tritonpack.packing import plan_epoch

TOKENS = 256
LENGTHS = log_normal(120, mean=60, high=TOKENS)
# Document i holds the token i + 1, so that a batch tells which documents it has.
DOCUMENTS = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]
RANDOM = np.random.default_rng(0)
# Pairs as TRL's DPOTrainer tokenizes them; the first token of a prompt is the number of the pair.
PAIRS = [
    {"prompt_ids": [number, *[7] * RANDOM.integers(1, 9)], "chosen_ids": [500, *[8] * RANDOM.integers(1, 20)],
     "rejected_ids": [501, *[9] * RANDOM.integers(1, 20)]}
    for number in range(60)
]  # fmt: skip
IMAGES = [
    {"input_ids": [number, *[5] * RANDOM.integers(1, 30)], "num_patches": int(RANDOM.integers(0, 3) * 16)}
    for number in range(60)
]


def make(dataset=DOCUMENTS, tokens=TOKENS, **options):
    return dataloader(dataset, tokens, **{"num_replicas": 1, "rank": 0, "seed": 0, **options})


def numbers_of(batch):
    return (batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] - 1).tolist()


def one_pass(loader):
    return [numbers_of(batch) for batch in loader]


def documents_in(batch):
    return [batch["input_ids"][0, start:stop].tolist() for start, stop in pairwise(batch["cu_seq_lens_q"].tolist())]


def planned(epoch, *, ranks=1, rank=0, seed=0):
    plan = plan_epoch(LENGTHS, TOKENS, ranks, seed=seed, epoch=epoch, tail="spread")
    return [row.tolist() for row in plan.rows_of_rank(rank)]


def of_pair(pair):
    return [{"input_ids": pair["prompt_ids"] + pair[name],
             "completion_mask": [0] * len(pair["prompt_ids"]) + [1] * len(pair[name])}
            for name in ("chosen_ids", "rejected_ids")]  # fmt: skip


UNITS = [of_pair(pair) for pair in PAIRS]


def table(rows, kind=None):
    return pytest.importorskip("datasets").Dataset.from_list(rows).with_format(kind)


def lazy(rows):
    """A dataset that tokenizes when it is read has no tokens to measure."""
    datasets = pytest.importorskip("datasets")
    raw = datasets.Dataset.from_dict({"text": range(len(rows))})
    return raw.with_transform(lambda found: {"input_ids": [rows[number]["input_ids"] for number in found["text"]]})


KINDS = {
    "list": list, "table": table, "lazy": lazy,
    "numpy": lambda rows: table(rows, "numpy"), "torch": lambda rows: table(rows, "torch"),
    "bins": BinDataset, "lists of documents": lambda rows: [[row] for row in rows],
}  # fmt: skip


@pytest.mark.fast("0-list", "0-lists of documents")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_passes_over_datasets_of_all_kinds(kind, workers, monkeypatch):
    """Each pass is the next epoch with every document once, without a warning; `set_epoch` chooses one."""
    monkeypatch.setattr(notices, "said", {"unpatched-model": None})
    loader = make(KINDS[kind](DOCUMENTS), num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            rows = one_pass(loader)
            assert rows == planned(epoch)
            assert sorted(chain.from_iterable(rows)) == list(range(120))
            assert (loader.epoch, len(loader)) == (epoch, len(rows))
        next(iter(loader))  # a pass that is broken off ends its epoch
        assert one_pass(loader) == planned(3)
        for epoch in (0, 5):
            iter(loader)  # as Lightning makes one
            (loader if epoch else loader.batch_sampler).set_epoch(epoch)
            assert one_pass(loader) == planned(epoch)
    with pytest.raises(ValueError, match="epoch must be"):
        loader.set_epoch(-1)


@REPEATABLE
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_document_once_and_no_row_too_long(lengths, ranks, shuffle, drop):
    documents = [{"input_ids": [number + 1] * length} for number, length in enumerate(lengths)]
    tokens = max(20, min(lengths)) if drop else 40
    options = {"shuffle": shuffle, "overlong": "drop" if drop else "error", "num_replicas": ranks}
    loaders = [make(documents, tokens, rank=rank, **options) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])}, "all ranks have the same steps"
    assert all(batch["input_ids"].numel() <= tokens for batch in chain.from_iterable(batches))
    found = [number for batch in chain.from_iterable(batches) for number in numbers_of(batch)]
    assert len(found) - loaders[0].rows.plan.filler_rows == len(set(found))
    assert sorted(set(found)) == [number for number, length in enumerate(lengths) if length <= tokens]


def test_seed_is_torch_s():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = make(seed=None)
    assert torch.equal(before, torch.get_rng_state()), "no random number is drawn"
    assert one_pass(loader) == planned(0, seed=5)


class TestStates:
    @pytest.mark.fast("0")
    @pytest.mark.parametrize("workers", [pytest.param(0, id="0"), pytest.param(2, id="2")])
    def test_batches_that_the_loop_got_count(self, workers):
        """Workers have fetched four more by then."""
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = make(**options)
        one_pass(loader)
        list(zip(range(3), loader, strict=False))
        state = loader.state_dict()
        counted = make()
        counted.set_epoch(1)
        assert state == counted.state_dict(batches_done=3) != counted.state_dict(batches_done=4)
        resumed = make(**options)
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert resumed.state_dict() == state, "before the first batch"
        resumed.set_epoch(1)  # which keeps its place
        assert one_pass(resumed) == planned(1)[3:]
        assert resumed.state_dict() == resumed.state_dict(batches_done=len(planned(1)))
        assert one_pass(resumed) == planned(2)

    def test_of_another_rank_and_of_another_seed(self):
        loader, other = (make(num_replicas=2, rank=rank) for rank in (0, 1))
        list(zip(range(2), loader, strict=False))
        other.load_state_dict(loader.state_dict())
        assert one_pass(other) == planned(0, ranks=2, rank=1)[2:]
        resumed, refused = make(seed=None), make(seed=1)
        resumed.load_state_dict(make().state_dict(batches_done=2))
        assert [one_pass(resumed), one_pass(resumed)] == [planned(0)[2:], planned(1)], (
            "without a seed it takes this one"
        )
        with pytest.raises(ValueError, match="seed was 0 and is 1"):
            refused.load_state_dict(make().state_dict(batches_done=1))
        assert one_pass(refused) == planned(0, seed=1)
        with pytest.raises(ValueError, match=r"batches_done must be an integer from 0 to .*, the number of steps"):
            refused.state_dict(batches_done=10**6)


def test_options_reach_collator_dataloader_and_sampler():
    loader = make(pad_to_multiple_of=64, pad_token_id=0)
    assert {batch["input_ids"].shape[1] % 64 for batch in loader} == {0}
    assert max(batch["input_ids"].shape[1] for batch in loader) <= TOKENS
    with pytest.raises(ValueError, match="can't be padded to multiples of 100"):
        make(pad_to_multiple_of=100, pad_token_id=0)
    assert make(worker_init_fn=print).worker_init_fn is print
    options = {"tail": "drop", "objective": "linear", "shuffle": False}
    loader, expected = (
        make(**options),
        MultipackDistributedBatchSampler(TOKENS, LENGTHS, 1, 0, **options),
    )
    assert one_pass(loader) == list(expected)
    assert f"{120 - len(np.unique(expected.plan.items))} document" in str(loader)
    loader = make(order=np.arange(120)[::-1])
    rows = one_pass(loader)
    assert "left out: no document of the order\n" in str(loader)
    assert np.corrcoef([np.mean(row) for row in rows], np.arange(len(rows)))[0, 1] < -0.95


def test_packing_collator_given_or_made():
    options = {"max_document_length": 50, "pad_to_multiple_of": 64, "pad_token_id": 0}
    for one, other in zip(make(**options), make(collate_fn=PackingCollator(**options)), strict=True):
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


def test_print():
    for ranks, filler in ((1, ""), (2, "1 filler row"), (3, "2 filler rows")):
        lines = str(make([{"input_ids": [5] * 3}], num_replicas=ranks)).splitlines()
        assert lines[0] == "PackedDataLoader of 1 document, 3 tokens (lengths from input_ids)"
        assert lines[1].startswith("  epoch 0: 1 step of ")
        assert lines[2:-2] == ([f"  {filler} in the last step, of documents that come twice"] if filler else [])
    tokens = sum(len(document["input_ids"]) for unit in UNITS for document in unit)
    first, *_, last = str(make(PAIRS, documents=of_pair)).splitlines()
    source = "lengths from the documents of each example"
    assert first == f"PackedDataLoader of 60 units of 120 documents, {tokens:,} tokens ({source})"
    assert last == "  columns: completion_mask, input_ids; left out: none"


def test_accelerate_cannot_count_batches():
    data_loader = pytest.importorskip("accelerate.data_loader")
    ours, counted = (make(num_replicas=2, rank=rank) for rank in (0, 1))
    next(iter(data_loader.prepare_data_loader(ours, num_processes=2, process_index=0, put_on_device=False)))
    with pytest.raises(ValueError, match=r"weren't counted here\. Pass batches_done"):
        ours.state_dict()
    next(iter(counted))
    assert ours.state_dict(batches_done=1) == counted.state_dict()
    with pytest.raises(ValueError, match="yields the rows of rank 1, of 2 ranks"):
        _ = make(num_replicas=2, rank=1, shard=True).batch_sampler.batch_size


def one_of_two_processes(rank, store):
    """Runs in each of two processes: ranks agree on the seed; their rows hold each pair once, and resume alike."""
    # As torchrun does. accelerate reads these, and finds the group that exists.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank + 3)
    assert one_pass(dataloader(DOCUMENTS, TOKENS)) == planned(0, ranks=2, rank=rank, seed=3), "the seed of rank 0"
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    prepared = accelerate.Accelerator(cpu=True).prepare(dataloader(DOCUMENTS, TOKENS))
    for epoch in range(2):
        assert one_pass(prepared) == planned(epoch, ranks=2, rank=rank, seed=3)

    def pairs(tokens=96, state=None):
        loader = dataloader(PAIRS, tokens, documents=of_pair, epochs=2)
        if state is not None:
            loader.load_state_dict(state)
        return loader, [documents_in(batch)[::2] for batch in loader]

    def of_all_ranks(value):
        values = [None, None]
        dist.all_gather_object(values, value)
        return values

    def numbers(rows):
        return [pair[0] for each in of_all_ranks(rows) for row in each for pair in row]

    whole, rows = pairs()
    assert len(set(of_all_ranks(len(rows)))) == 1
    assert len(numbers(rows)) - whole.rows.plan.filler_rows == len(set(numbers(rows))) == 60
    whole.set_epoch(0)
    state = whole.state_dict(batches_done=2)
    assert of_all_ranks(state) == [state, state]
    assert pairs(state=state)[1] == rows[2:]
    later = numbers(pairs(tokens=120, state=state)[1])
    assert sorted({*numbers(rows[:2]), *later}) == list(range(60))
    assert not set(numbers(rows[:2])) & set(later)
    with pytest.raises(ValueError, match="batch_max_length is 96 on rank 0 and 97 on rank 1"):
        pairs(tokens=96 + rank)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    store = str(tmp_path / "store")
    torch.multiprocessing.start_processes(one_of_two_processes, (store,), nprocs=2, start_method="fork")
